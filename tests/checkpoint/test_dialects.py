"""Checkpoints of other versions: each stored sample is read and audited; unknown settings are reported in one line.

tests/data/dialects describes how they were made; docs/compatibility.md is their table.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import keep
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import DATA, ROOT

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.checkpoint.linears import covering_pattern

DIALECTS = DATA / "dialects"
SAMPLES = sorted(p.stem for p in DIALECTS.glob("*.json"))
LINEARS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(params=SAMPLES)
def sample(request, tmp_path) -> tuple[str, Path]:
    return request.param, keep.unpack(request.param, tmp_path / "model")


def test_there_is_a_sample_of_each_version_in_the_table():
    table = (ROOT / "docs/compatibility.md").read_text()
    for name in SAMPLES:
        producer, version = name.rsplit("-", 2)[0], name.rsplit("-", 2)[1]
        assert version in table and producer.split("-")[0] in table.lower(), name
    assert sum(f.stat().st_size for f in DIALECTS.rglob("*") if f.is_file()) < 400_000


def test_it_is_read_and_audited(sample):
    name, path = sample
    audit = aq.checkpoint.audit(path)
    assert audit.ok, [(f.code, f.tensor, f.message) for f in audit.findings]
    folder = ModelFolder(path)
    dialect = dialects.of(folder)
    assert dialect is (modelopt if name.startswith("modelopt") else compressed_tensors)
    settings = dialect.config(folder)
    expected = {"fp8": "FP8", "nvfp4a16": "W4A16_NVFP4"}.get(name.rsplit("-", 1)[1], "NVFP4")
    assert settings.algo == expected and (expected == "FP8" or settings.group == 16)
    assert "lm_head" in settings.excluded
    assert (settings.kv_cache == "FP8") == name.endswith("kv8")
    linears = dialect.linears(folder)
    unquantized = (
        {n for n in LINEARS if n.startswith("self_attn")} if name.endswith("mlp_only") else set()
    )
    assert {n.removeprefix("model.layers.0.") for n in linears} == LINEARS - unquantized


def test_its_weights_are_those_of_the_format(sample):
    """Dequantize by the definition, in NumPy, from the bytes of the file; compressed-tensors' divisor is inverted."""
    name, path = sample
    folder = ModelFolder(path)
    for linear in dialects.linears(folder).values():
        if linear.format != "nvfp4":
            continue
        packed = folder.tensor(linear.weight)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
        scale = folder.tensor(linear.block_scale).astype(np.float32)
        whole = folder.scalar(_whole(linear))
        whole = np.float32(1) / whole if name.startswith("compressed") else whole
        expected = E2M1[codes] * np.repeat(scale * whole, 16, axis=1)
        np.testing.assert_allclose(
            linear.dequantize(folder).astype(np.float32), expected, rtol=2**-8
        )


def _whole(linear) -> str:
    return next(
        t for t in linear.tensors() if t.endswith(("weight_scale_2", "weight_global_scale"))
    )


def test_all_versions_of_modelopt_give_the_same_bytes():
    """From 0.37 to 0.47 only the list of excluded modules changed, and the cache's scales in 0.43."""
    held = {
        n: json.loads((DIALECTS / f"{n}.json").read_text())
        for n in SAMPLES
        if n.startswith("modelopt")
    }
    for recipe in ("nvfp4", "mlp_only", "fp8"):
        assert len({h["weights"] for n, h in held.items() if n.endswith(f"-{recipe}")}) == 1, recipe
    old = {h["weights"] for n, h in held.items() if n.endswith("kv8") and n < "modelopt-0.43"}
    new = {h["weights"] for n, h in held.items() if n.endswith("kv8") and n > "modelopt-0.43"}
    assert len(old) == len(new) == 1 and old != new


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"quant_algo": "NVFP5"}, "algorithm_unknown"),
        ({"quant_algo": "W4A8_MXFP4_FP8"}, "algorithm_unknown"),
        ({"quant_method": "quark"}, "method_unknown"),
        ({"quant_method": "gptq", "bits": 4}, "method_unknown"),
    ],
)
def test_unknown_settings_are_one_finding(tmp_path, change, code):
    path = keep.unpack("modelopt-0.47.0-nvfp4", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").unlink()
    audit = aq.checkpoint.audit(path)
    assert [f.code for f in audit.findings] == [code], [(f.code, f.message) for f in audit.findings]
    assert next(iter(change.values())) in audit.findings[0].message


def test_settings_in_only_one_of_the_two_files(tmp_path):
    """Older exporters wrote only hf_quant_config.json, some tools only config.json: both are read the same."""
    whole = keep.unpack("modelopt-0.47.0-nvfp4", tmp_path / "whole")
    before = modelopt.config(ModelFolder(whole))
    (whole / "hf_quant_config.json").unlink()
    inline = modelopt.config(ModelFolder(whole))
    legacy = keep.unpack("modelopt-0.47.0-nvfp4", tmp_path / "legacy")
    config = json.loads((legacy / "config.json").read_text())
    del config["quantization_config"]
    (legacy / "config.json").write_text(json.dumps(config))
    apart = modelopt.config(ModelFolder(legacy))
    for read in (inline, apart):
        assert (read.algo, read.group, read.excluded) == (
            before.algo,
            before.group,
            before.excluded,
        )


NAMES = st.lists(st.sampled_from(["a", "b", "a1", "mlp", "0", "[a]"]), min_size=1, max_size=4)
MODULES = NAMES.map(".".join)
PATTERNS = st.one_of(
    MODULES,
    st.tuples(MODULES, st.sampled_from(["*", ".*", "?", "*b", "[ab]*"])).map("".join),
    st.sampled_from(["*", "", "re:a", "re:.*b$", "re:(", "re:(a)\\1", "*mlp*", "[!a]*", "a.*.b"]),
)


@given(MODULES, st.lists(PATTERNS, max_size=6))
def test_the_first_pattern_that_covers_a_module_is_that_of_a_plain_search(module, patterns):
    def covers(pattern: str) -> bool:
        if pattern.startswith("re:"):
            try:
                return re.match(pattern[3:], module) is not None
            except re.error:
                return False
        return module == pattern or fnmatchcase(module, pattern)

    assert covering_pattern(module, patterns) == next(filter(covers, patterns), None)
