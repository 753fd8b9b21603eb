"""The memory that a server is predicted to need: one that does not fit is refused, with a change that makes it fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import published_models
import pytest
import sparse_checkpoints
from hypothesis import given
from hypothesis import strategies as st

from annie_quant.checkpoint.size import Caches
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.host import Memory
from annie_quant.ops import memory_budget, serving
from annie_quant.ops.memory_budget import MemoryNeed, ServingLimits

SPARK = 130_700_000_000  # 121.7 GiB
KEEP = SPARK // 12
WORDS = ["--gpu-memory-utilization", "0.85", "--max-num-seqs", "8", "--max-model-len", "32768"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("models")
    return sparse_checkpoints.published("nvidia/Qwen3.6-27B-NVFP4", home / "27b")


def spark(used: int = 4_000_000_000) -> Memory:
    return Memory(SPARK, SPARK - used, 0)


def test_weights_caches_graphs_and_runtime_are_counted(model):
    need = memory_budget.need_of(model, WORDS, "vllm")
    config = published_models.config("nvidia/Qwen3.6-27B-NVFP4")["text_config"]
    full = config["layer_types"].count("full_attention")
    per_token = 2 * full * config["num_key_value_heads"] * config["head_dim"]
    element = 1 if "kv_cache" in json.dumps(config) else need.caches.position // per_token
    assert need.caches.position == per_token * element
    total = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert 0 < total - need.weights < 1e7  # the headers
    assert need.cache_bytes > 8 * 32768 * need.caches.position
    assert need.used_bytes == need.weights + need.cache_bytes + 6_000_000_000
    assert need.peak_bytes(SPARK) == round(0.85 * SPARK)
    eager = memory_budget.need_of(model, [*WORDS, "--enforce-eager"], "vllm")
    assert need.used_bytes - eager.used_bytes == memory_budget.GRAPHS_BYTES
    memory_budget.check(need, spark(), KEEP)  # fits


@pytest.mark.parametrize("recipe", ["2026-11", "2026-11-27b", "2026-07-35b-a3b", "2026-03"])
def test_the_recipes_fit_an_idle_spark(model, recipe):
    words = shlex.split(serving.command(model, "vllm", 8000, recipe=recipe))
    memory_budget.check(memory_budget.need_of(model, words, "vllm"), spark(), KEEP)


def test_a_server_that_reserves_too_much_is_refused_with_the_share_that_fits(model):
    need = memory_budget.need_of(model, WORDS, "vllm")
    busy = spark(used=40_000_000_000)
    with pytest.raises(EnvironmentFault, match=r"predicted peak 111\.1 GB") as caught:
        memory_budget.check(need, busy, KEEP)
    share = re.search(r"--memory-share (0\.\d+)", caught.value.hint)[1]
    words = ServingLimits(share=float(share)).applied(WORDS, "vllm")
    memory_budget.check(memory_budget.need_of(model, words, "vllm"), busy, KEEP)


@given(
    weights=st.integers(1, 10**11),
    position=st.integers(0, 10**6),
    context=st.integers(1, 10**6),
    streams=st.integers(1, 256),
    share=st.sampled_from([0.0, 0.4, 0.85, 0.95]),
    available=st.integers(0, SPARK),
)
def test_each_change_that_is_named_makes_it_fit(
    weights, position, context, streams, share, available
):
    need = MemoryNeed(weights, Caches(position=position), context, streams, 0, 0, share)
    memory = Memory(SPARK, available, 0)
    fits = need.peak_bytes(SPARK) <= available - KEEP
    try:
        memory_budget.check(need, memory, KEEP)
    except EnvironmentFault as error:
        assert not fits and error.hint
        for name, field in (("--context", "context"), ("--streams", "streams")):
            found = re.search(rf"{name} (\d+)", error.hint)
            if found:
                values = {"context": context, "streams": streams, field: int(found[1])}
                smaller = MemoryNeed(weights, need.caches, **values)
                assert smaller.used_bytes <= available - KEEP
        found = re.search(r"--memory-share (\S+?)(;|$)", error.hint)
        if found:
            assert 0 < float(found[1]) * SPARK <= available - KEEP
            if error.hint.startswith("add --memory-share"):
                assert need.used_bytes <= available - KEEP
    else:
        assert fits


def test_limits_replace_those_of_a_command():
    limits = ServingLimits(context=4096, streams=2, share=0.5)
    words = limits.applied(["vllm", "serve", "--max-num-seqs", "8"], "vllm")
    assert words[:4] == ["vllm", "serve", "--max-num-seqs", "2"]
    assert words[4:] == ["--max-model-len", "4096", "--gpu-memory-utilization", "0.5"]
    assert limits.applied(["x"], "sglang")[1::2] == list(memory_budget.OPTIONS["sglang"])
    assert ServingLimits().applied(WORDS, "vllm") == WORDS
