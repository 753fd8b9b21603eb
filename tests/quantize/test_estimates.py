"""Estimates before anything starts: sizes counted from shapes, memory, times."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import checkpoint_zoo as zoo
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.decode_speed import DEVICES
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.models.family import ModelSize
from annie_quant.quantize import available, estimates, strategies, work_estimate
from annie_quant.quantize.rates import SPARK_RATES, Rates, fastest_seconds, measure_rates
from annie_quant.quantize.strategy import in_float32
from annie_quant.quantize.work_estimate import AttentionSize, TextSize, WorkEstimate

NEEDS_TORCH = (
    "whether a processor has bfloat16 is asked of torch: pip install annie-quant[quantize]"
)


def test_the_published_counts_of_the_9b():
    """8.953 B weights: MLP 4.832, DeltaNet 1.617, attention .470, embedding and head 1.017 each."""
    size = estimates.published_sizes()["9b"]
    counts = size.counts
    billions = {k: round(v / 1e9, 3) for k, v in counts.items()}
    assert billions["mlp"] == 4.832 and billions["attention"] == 0.470 and billions["head"] == 1.017
    assert billions["deltanet"] + billions["rest"] == pytest.approx(1.617, abs=0.003)
    assert sum(counts.values()) / 1e9 == pytest.approx(8.953, abs=0.002)
    assert (size.layers, size.hidden_size, size.intermediate_size) == (32, 4096, 12288)
    assert sum(estimates.published_sizes()["27b"].counts.values()) / 1e9 == pytest.approx(
        26.9, abs=0.1
    )


@pytest.mark.parametrize(
    ("strategy", "gb", "tok_s"),
    [("mlp_only", 10.96, 26), ("w4a16_mixed", 7.42, None), ("naive", None, 39)],
)
def test_sizes_and_ceilings_that_are_written_down(strategy, gb, tok_s):
    expected = estimates.estimate("9b", strategy)
    if gb:
        assert expected.size_bytes / 1e9 == pytest.approx(gb, abs=0.02)
    if tok_s:
        assert DEVICES["gb10"].read_bytes_s / expected.speed.read_bytes == pytest.approx(
            tok_s, abs=0.6
        )


def test_the_count_of_a_folder_is_the_real_output(tmp_path):
    """direct on tiny-annie, as counted before and as written after."""
    from annie_quant import quantize

    expected = estimates.estimate(TINY_ANNIE, "direct", rates=SPARK_RATES)
    result = quantize.run("direct", TINY_ANNIE, tmp_path / "out")
    assert result.size_bytes == pytest.approx(expected.size_bytes, rel=0.03)


def test_a_27b_is_quantized_layer_by_layer_on_a_spark():
    gptq = estimates.estimate("27b", "gptq", answers="given")
    assert gptq.fits and gptq.peak_bytes < 20e9
    own = estimates.estimate("27b", "gptq")
    assert not own.layerwise and own.peak_bytes > 2 * own.weights, "the model answers the prompts"
    assert estimates.estimate("27b", "naive").peak_bytes < 20e9
    assert estimates.estimate("27b", "auto_mixed").peak_bytes > 53.8e9
    small = replace(SPARK_RATES, memory=8e9)
    crowded = estimates.estimate("27b", "auto_mixed", rates=small)
    assert not crowded.fits and "DOES NOT FIT" in "\n".join(crowded.lines())


def test_best_of_a_9b_takes_no_more_than_was_measured_with_learned_rounding():
    """38.0 GB of a GPU and 6.7 GB of the host then (tests/perf/strategies.md). What stays: three copies of the hidden states.

    Tuning norms holds the model twice.
    """
    tokens = 512 * 2048
    peak = estimates.estimate("9b", "best", samples=512, tokens=2048).peak_bytes
    assert 3 * tokens * 4096 * 2 + 6.7e9 < peak < 46e9


def test_trials_have_the_whole_model_in_bf16():
    gptq = estimates.estimate("9b", "gptq", answers="given")
    assert gptq.layerwise and gptq.fits
    trials = estimates.estimate("27b", "best")
    assert not trials.layerwise and trials.peak_bytes > 2 * trials.weights
    with pytest.raises(UsageError, match="no setting 'nope'"):
        estimates.estimate("9b", "best", options={"nope": "1"})


def test_a_family_that_is_not_known_is_in_memory_as_a_whole(tmp_path):
    """naive computes it with transformers."""
    known = estimates.estimate(TINY_ANNIE, "naive", rates=SPARK_RATES)
    config = json.loads((TINY_ANNIE / "config.json").read_text()) | {"model_type": "mistral"}
    for file in TINY_ANNIE.iterdir():
        if file.is_file():
            shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        known.layerwise and not estimates.estimate(tmp_path, "naive", rates=SPARK_RATES).layerwise
    )
    assert estimates.estimate(tmp_path, "direct", rates=SPARK_RATES).layerwise


def test_a_configuration_without_sizes_is_named(tmp_path):
    """GPT-2 calls them n_layer and n_embd."""
    folder = zoo.bf16(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["n_embd"] = config.pop("hidden_size")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no num_hidden_layers and hidden_size"):
        estimates.estimate(folder, "direct")


@pytest.mark.parametrize(
    ("fast_bf16", "weight_bytes", "float32"),
    [(True, 2 << 30, False), (False, 2 << 30, True), (True, 1 << 29, True)],
)
def test_a_processor_without_bfloat16_computes_in_float32(
    monkeypatch, fast_bf16, weight_bytes, float32
):
    """With AVX2 alone naive of a 0.5B was estimated at 24 minutes in bfloat16, at half a minute in float32."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast_bf16)
    cpu = replace(SPARK_RATES, flop_s=1e9, float32_flop_s=1e11, cpu_flop_s=1e11)
    assert in_float32(weight_bytes, on_cpu=True) == float32
    assert in_float32(weight_bytes, on_cpu=False) == (weight_bytes < 1 << 30), "a GPU has bfloat16"
    text = {
        r.flop_s: estimates.estimate("9b", "naive", rates=r).seconds["text"]
        for r in (cpu, replace(cpu, flop_s=1e10))
    }
    assert (text[1e9] == text[1e10]) == (not fast_bf16)


def test_every_strategy_has_an_estimate():
    for name in available():
        expected = estimates.estimate("9b", name)
        assert 4.5 < expected.bits_per_weight < 16 and sum(expected.seconds.values()) > 0
    with pytest.raises(UsageError, match="no strategy called 'magic'"):
        estimates.estimate("9b", "magic")


def test_rates_are_measured_here():
    pytest.importorskip("torch", reason="rates need torch: pip install annie-quant[quantize]")
    rates = measure_rates()
    assert (
        min(rates.flop_s, rates.copy, rates.encode, rates.memory) > 1e6
        and "measured here" in rates.description
    )


def test_time_in_which_another_process_has_the_processor_does_not_count():
    """A load elsewhere takes the processor away, as sleep does here; 67 hours or 3 were estimated for one command before."""

    def work():
        time.sleep(0.2)
        sum(range(10_000))

    assert fastest_seconds(work, "cpu") < 0.1


def sizes_of(label, layers, hidden, width, key_values, vocabulary):
    mlp, attention = layers * 3 * hidden * width, layers * 2 * hidden * (hidden + key_values)
    counts = {
        "mlp": mlp,
        "attention": attention,
        "head": vocabulary * hidden,
        "embedding": vocabulary * hidden,
    }
    return ModelSize(label, counts, layers, hidden, width)


QWEN_CODER = {
    "0.5b": sizes_of("0.5B", 24, 896, 4864, 128, 151936),
    "1.5b": sizes_of("1.5B", 28, 1536, 8960, 256, 151936),
}
# The matmuls of an H200 with 16 processor cores, assumed.
H200 = Rates(650e12, 50e12, 16 * 60e9, 3.5e12, 16 * 2e9, 130e9, "H200")


@pytest.mark.parametrize(
    ("model", "strategy", "seconds"),
    [("0.5b", "gptq", 41), ("1.5b", "gptq", 105)],
)
def test_times_on_an_h200_are_within_twice_what_was_measured(monkeypatch, model, strategy, seconds):
    """256 rows of BFCL, about 100,000 tokens. Naive takes no longer than gptq."""
    monkeypatch.setattr(estimates, "published_sizes", lambda: QWEN_CODER)
    expected = sum(estimates.estimate(model, strategy, 256, 390, H200).seconds.values())
    assert seconds / 2 < expected < 2 * seconds
    assert sum(estimates.estimate(model, "naive", 256, 390, H200).seconds.values()) < expected


@pytest.mark.parametrize(("strategy", "seconds"), [("naive", 361), ("gptq", 587)])
def test_times_on_two_cores_are_within_twice_what_was_measured(monkeypatch, strategy, seconds):
    """48 rows of BFCL on Coder-0.5B, 27,000 tokens after shared beginnings; AVX2, .16 TFLOP/s in float32, 2026-11-29."""
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    monkeypatch.setattr(estimates, "published_sizes", lambda: QWEN_CODER)
    monkeypatch.setattr(
        work_estimate, "in_float32", lambda *_: True
    )  # as there, also where this processor has bfloat16
    cores = Rates(2e9, 0.16e12, 0.16e12, 18e9, 12e9, 24e9, "two cores")
    expected = sum(estimates.estimate("0.5b", strategy, 48, 560, cores).seconds.values())
    assert seconds / 2 < expected < 2 * seconds


# Conversations, tokens, computed ones and shared prefix of the rows in tests/perf/long_prompts.md.
SHORT_ON_H200 = TextSize(400, 250_000, 84_844, 467)
LONG_ON_H200 = TextSize(400, 3_040_000, 171_014, 7_990)
SHORT_ON_CPU = TextSize(60, 72_307, 32_250, 754)
LONG_ON_CPU = TextSize(60, 324_190, 36_521, 5_070)


def workload(strategy, size, attention, text, rates):
    chosen = strategies.find(strategy)
    rounded = sum(n for kind, n in size.counts.items() if chosen.bits(kind) < 16)
    size_bytes = sum(n * chosen.bits(kind) / 8 for kind, n in size.counts.items())
    return WorkEstimate(chosen.cost, size, attention, text, rates, rounded, size_bytes)


@pytest.mark.parametrize(
    ("strategy", "text", "gigabytes"),
    [
        ("naive", SHORT_ON_H200, 0.967),
        ("gptq", SHORT_ON_H200, 2.272),
        ("best", SHORT_ON_H200, 4.925),
        ("naive", LONG_ON_H200, 1.551),
        ("gptq", LONG_ON_H200, 3.525),
        ("best", LONG_ON_H200, 14.866),
    ],
)
def test_memory_on_an_h200_is_within_1_3_times_what_was_measured(strategy, text, gigabytes):
    """Coder-0.5B, torch's largest allocation; 4.5 GB were estimated for 14.9 of `best` before."""
    attention = AttentionSize(24, 14, 24 * 2 * 128)
    expected = workload(strategy, QWEN_CODER["0.5b"], attention, text, H200).peak_bytes(True)
    assert gigabytes / 1.3 < expected / 1e9 < 1.3 * gigabytes


@pytest.mark.parametrize(
    ("strategy", "text", "seconds", "megabytes"),
    [
        ("naive", SHORT_ON_CPU, 19.1, 602),
        ("gptq", SHORT_ON_CPU, 27.8, 732),
        ("best", SHORT_ON_CPU, 118.1, 792),
        ("naive", LONG_ON_CPU, 23.8, 632),
        ("gptq", LONG_ON_CPU, 42.6, 788),
        ("best", LONG_ON_CPU, 278.1, 772),
    ],
)
def test_prompts_of_500_and_5000_tokens_take_on_two_cores_what_is_estimated(
    strategy, text, seconds, megabytes
):
    """tiny-annie: processor seconds and largest resident set of a process (tests/perf/long_prompts.md)."""
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    size = estimates.size_of_folder(TINY_ANNIE)
    attention = AttentionSize.of(size, ModelFolder(TINY_ANNIE))
    cores = Rates(2e9, 0.07e12, 0.07e12, 18e9, 5.8e9, 24e9, "two cores")
    expected = workload(strategy, size, attention, text, cores)
    assert seconds / 2 < sum(expected.seconds().values()) < 2 * seconds
    assert megabytes / 1.3 < expected.peak_bytes(True) / 1e6 < 1.3 * megabytes


def test_without_data_the_estimate_says_for_which_text():
    expected = estimates.estimate("9b", "best", samples=100, tokens=2000)
    assert "  text    100 conversations of 2000 tokens, assumed" in "\n".join(expected.lines())


def test_the_text_is_counted_in_the_file_and_shared_beginnings_once(tmp_path):
    system = {"role": "system", "content": "Speak plainly. " * 200}
    rows = [{"messages": [system, {"role": "user", "content": f"{i} " * 30}]} for i in range(40)]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = estimates.text_of_file(file, 32)
    assert text.conversations == 32
    assert text.tokens > 10 * 1000 > 5 * text.computed
    assert text.computed < 1000 + 32 * 40
    assert estimates.text_of_file(file, 512).conversations == 40


def test_the_text_is_counted_as_the_strategy_reads_it(tmp_path):
    """The estimate of a folder names the rows that are used, and refuses what the strategy refuses."""
    pytest.importorskip("torch", reason="the tokenizer: pip install annie-quant[quantize]")
    rows = [json.loads(line) for line in CALIBRATION.read_text().splitlines()]
    rows[0]["messages"][1]["content"] = "a long story " * 3000
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    expected = estimates.estimate(TINY_ANNIE, "gptq", rates=SPARK_RATES, calib_data=file)
    assert "  text    19 of 20 conversations" in "\n".join(expected.lines())
    assert "1 longer than the model's context of 4,096 tokens" in expected.text
    with pytest.raises(UsageError, match=r"only \d of 20 conversations"):
        estimates.estimate(TINY_ANNIE, "gptq", rates=SPARK_RATES, calib_data=file, calib_tokens=100)
