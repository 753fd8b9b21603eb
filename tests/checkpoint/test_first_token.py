"""Predicted time to the first token: errors on published rows, the published table, folders, bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import CliRunner
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import quantize
from annie_quant.checkpoint import ModelFolder, dialects, first_token, prompt_work
from annie_quant.checkpoint.decode_speed import DEVICES
from annie_quant.checkpoint.first_token import NoRate, Prompt, prefill
from annie_quant.checkpoint.prompt_work import PromptWork
from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.documents import Device
from annie_quant.quantize import estimates
from annie_quant.quantize.rates import SPARK_RATES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/perf"))
import first_token as rows  # noqa: E402

GB10 = DEVICES["gb10"]


def nine_b(share: dict[str, float]) -> PromptWork:
    return rows.work_of("Qwen3.5-9B", share)


def ms_of(work: PromptWork, tokens: int, cached: int = 0, server: str = "vllm") -> float:
    return first_token.predict(work, server, GB10, Prompt(tokens, cached)).ms


@pytest.fixture(scope="module")
def left_out() -> list[tuple[rows.Row, float]]:
    return rows.errors_left_out()


def test_models_that_are_left_out_of_the_fit_are_predicted(left_out) -> None:
    sizes = np.abs([error for _, error in left_out])
    assert len(sizes) == 133 and len({row.model for row, _ in left_out}) == 18
    assert np.median(sizes) <= 0.10
    assert np.quantile(sizes, 0.9) <= 0.25
    assert prefill().error_90 == pytest.approx(np.quantile(sizes, 0.9), rel=0.01)


def test_a_left_out_model_does_not_decide_its_own_prediction(left_out) -> None:
    """Its errors are those of a fit that never saw it; a fit that sees other times of it differs."""
    model = ("vllm", "Qwen3.5-9B")
    known = rows.fitted_rows()
    own = [row for row in known if row.model == model]
    others = [row for row in known if row.model != model]
    constants = rows.fit(others)
    errors = [error for row, error in left_out if row.model == model]
    assert errors == pytest.approx([row.error(constants) for row in own])
    assert max(map(abs, errors)) < 0.05
    slower = [rows.Row(r.group, r.work, r.tokens, r.cached, 10 * r.ms) for r in own]
    assert rows.fit(others + slower)["vllm.linear.bf16"] < constants["vllm.linear.bf16"]


def test_shipped_constants_are_the_fit_of_the_shipped_rows() -> None:
    fitted = rows.fit(rows.fitted_rows())
    assert fitted == pytest.approx(prefill().constants, rel=0.02)


def test_all_rows_are_shipped_with_their_sources() -> None:
    shipped = json.loads(rows.ASSET.read_text())
    assert sum(len(group["points"]) for group in shipped["rows"]) == 175
    assert all(shipped["sources"][group["source"]] for group in shipped["rows"])


# Predicted by another program with another fit (prior .05), ms at 128, 512, 2,048 and 8,192 tokens.
TABLE = {
    "bf16": (106, 181, 564, 2230),
    "all W4A4": (60, 98, 279, 1104),
    "all W4A16 (Marlin)": (78, 198, 695, 2768),
    "MLP W4A4, rest FP8": (65, 110, 324, 1284),
    "MLP W4A4, rest Marlin": (64, 127, 404, 1606),
    "`w4a16_mixed`": (76, 179, 614, 2446),
    "Q4_K_M, llama-server": (71, 228, 877, 3546),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_published_table_of_a_9b(name: str) -> None:
    assert rows.answers()[name] == pytest.approx(TABLE[name], rel=0.02)


@pytest.mark.parametrize(("label", "name"), [("9b", "Qwen3.5-9B"), ("27b", "Qwen3.5-27B")])
def test_shapes_of_rows_have_the_weights_of_published_models(label: str, name: str) -> None:
    counts = estimates.published_sizes()[label].counts
    linears = counts["mlp"] + counts["attention"] + counts["deltanet"]
    shape = prefill().models[name]
    assert shape.linear_weights == pytest.approx(linears, rel=2e-3)
    assert shape.head_weights == counts["head"]


def test_cached_tokens_cost_only_their_attention() -> None:
    work = nine_b({"w4a4": 1.0})
    cold = ms_of(work, 2304)
    assert ms_of(work, 256) < ms_of(work, 2304, cached=2048) < cold / 2
    # 8 layers, 16 heads of 256: 4 * heads * size * pairs / rate
    seconds = 8 * 4 * 16 * 256 * 256 * 2048 / (prefill().constants["vllm.attention.256"] * 1e12)
    extra = ms_of(work, 2304, cached=2048) - ms_of(work, 256)
    assert extra == pytest.approx(seconds * 1e3)


def test_flops_decide_not_linears() -> None:
    """Gate, up and down are 3 of 8 linears and 70 % of the FLOPs."""
    w4a4 = ms_of(nine_b({"w4a4": 1.0}), 2048)
    w4a16 = ms_of(nine_b({"w4a16": 1.0}), 2048)
    mlp = ms_of(nine_b({"w4a4": 0.7, "w4a16": 0.3}), 2048)
    assert (w4a16 - mlp) / (w4a16 - w4a4) == pytest.approx(0.7, abs=0.01)


def test_the_interval_is_the_predictors_own_error() -> None:
    predicted = first_token.predict(nine_b({"bf16": 1.0}), "vllm", GB10, Prompt(2048))
    error = prefill().error_90
    assert predicted.ms / predicted.low_ms - 1 == pytest.approx(error)
    assert 1 - predicted.ms / predicted.high_ms == pytest.approx(error)


# ---- folders


@pytest.mark.parametrize(
    ("strategy", "kernels"),
    [("direct", {"w4a16", "bf16"}), ("naive", {"w4a4", "bf16"}), ("mlp_only", {"w4a4", "bf16"})],
)
def test_weights_of_a_folder_are_counted_per_kernel(
    strategy: str, kernels: set[str], tmp_path
) -> None:
    source = ModelFolder(TINY_ANNIE)
    total = sum(weights for weights, _ in prompt_work.work_of(source).linears.values())
    quantize.run(strategy, TINY_ANNIE, tmp_path / "x", calib_data=CALIBRATION, calib_samples=4)
    work = prompt_work.work_of(ModelFolder(tmp_path / "x"))
    assert set(work.linears) == kernels
    assert sum(weights for weights, _ in work.linears.values()) == total
    mlp = sum(source.info(n).elements for n in source if ".mlp." in n and n.endswith(".weight"))
    in_4_bits = total - work.linears["bf16"][0]
    assert in_4_bits == mlp if strategy == "mlp_only" else in_4_bits > 0.99 * total
    dry = estimates.estimate(TINY_ANNIE, strategy, rates=SPARK_RATES).first_token
    assert dry == first_token.describe_folder(ModelFolder(tmp_path / "x"))


def test_experts_count_by_the_share_that_a_token_passes() -> None:
    folder = ModelFolder(TINY_ANNIE.parent / "tiny-moe")
    work = prompt_work.work_of(folder)
    config = folder.text_config
    width = config["moe_intermediate_size"]
    experts = config["num_hidden_layers"] * config["num_experts"]
    assert work.experts["bf16"][0] == experts * 3 * config["hidden_size"] * width
    assert work.shape.active_share == config["num_experts_per_tok"] / config["num_experts"]


def test_a_tied_head_is_read_and_a_damaged_folder_is_named(tmp_path, monkeypatch) -> None:
    folder = ModelFolder(TINY_ANNIE)
    head = folder.tensors.pop("lm_head.weight")
    assert prompt_work.work_of(folder).head_bytes == head.size_bytes  # the embedding's shape

    quantize.run("direct", TINY_ANNIE, tmp_path / "x")
    damaged = ModelFolder(tmp_path / "x")
    scale = next(name for name in damaged if name.endswith("down_proj.weight_scale"))
    broken = dialects.linears(damaged)
    damaged.tensors.pop(scale)
    monkeypatch.setattr(dialects, "linears", lambda folder: broken)
    line = first_token.describe_folder(damaged)
    assert line.startswith("first token: not predicted") and scale in line


# ---- what is not known, and bad input


@pytest.mark.parametrize(
    ("device", "server", "share", "message"),
    [
        (DEVICES["h200"], "vllm", {"bf16": 1.0}, "no prefill rate is known for NVIDIA H200"),
        (Device(name="273 GB/s", read_bytes_s=2.73e11), "vllm", {"bf16": 1.0}, "for 273 GB/s"),
        (GB10, "sglang", {"bf16": 1.0}, "no prefill rate is known for sglang"),
        (GB10, "llama.cpp", {"bf16": 1.0}, "for bf16 in llama.cpp on a GB10"),
    ],
)
def test_without_a_rate_nothing_is_predicted(device, server, share, message) -> None:
    with pytest.raises(NoRate, match=message):
        first_token.predict(nine_b(share), server, device, Prompt(2048))
    line = first_token.describe({"": nine_b(share)}, server, device, Prompt(2048))
    assert message in line and " ms" not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-tokens", "5000"], "tiny-annie: its context is 4,096, not 5,000 prompt tokens"),
        (["--cached-tokens", "2048"], "2,048 cached of 2,048 prompt tokens: expected fewer"),
    ],
)
def test_a_prompt_that_does_not_fit_is_one_line_before_any_work(options, message, tmp_path) -> None:
    output = tmp_path / "x"
    command = [
        "quantize",
        "--strategy",
        "direct",
        "--model",
        str(TINY_ANNIE),
        "--output",
        str(output),
    ]
    result = CliRunner().invoke(cli, [*command, *options])
    assert isinstance(result.exception, UsageError) and message == result.exception.message
    assert not output.exists()


def test_serve_prints_both_halves_of_the_speed_before_the_command(tmp_path) -> None:
    quantize.run("direct", TINY_ANNIE, tmp_path / "x")
    command = [
        "serve",
        str(tmp_path / "x"),
        "--runtime",
        "vllm",
        "--dry-run",
        "--prompt-tokens",
        "512",
    ]
    shown = CliRunner().invoke(cli, command)
    assert shown.exit_code == 0
    assert "tok/s on NVIDIA GB10" in shown.output
    assert "512 prompt tokens, vLLM on NVIDIA GB10; FLOPs of the linears w4a16 100%" in shown.output


def test_eval_prints_and_emits_both_halves_of_the_speed(tmp_path) -> None:
    quantize.run("direct", TINY_ANNIE, tmp_path / "x")
    command = ["eval", str(tmp_path / "x"), "--reference", str(TINY_ANNIE), "--n", "1"]
    command += ["--workloads", "factual", "--quick"]
    shown = CliRunner().invoke(cli, command)
    assert "tok/s on NVIDIA GB10" in shown.output
    assert "first token after about" in shown.output
    emitted = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    first = emitted["predicted_first_token"]
    assert emitted["predicted"]["device"] == first["device"] == "NVIDIA GB10"
    assert first["low_ms"] < first["ms"] < first["high_ms"] and first["prompt_tokens"] == 2048
