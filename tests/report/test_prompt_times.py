"""The first token in report.md and comparison.md: ratios with what limits them, and what kernels can explain."""

from __future__ import annotations

import msgspec
import pytest
from bench_cases import config_of, known, row

from annie_quant import documents, report
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.checkpoint import decode_speed, first_token
from annie_quant.checkpoint.kernel_ratio import kernel_ratios
from annie_quant.checkpoint.prompt_work import PromptWork

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def ladder(name, ms_per_1000, cached=0):
    """Records of first turns on a line, with 20 ms at 0 tokens."""
    rows = []
    for tokens in LENGTHS:
        for i in range(2):
            more = {"usage": {"prompt_tokens": tokens + i}, "cached_tokens": cached}
            ms = 20 + ms_per_1000 * (tokens + i) / 1000
            rows.append(row(name, ms, case=f"{tokens}-{i}", workload="first_token", **more))
    return rows


def talk(name, times, cached):
    rows = []
    for turn, ms in enumerate(times):
        prompt = 200 + 800 * turn
        before = None if cached is None else int(cached * 800 * turn)
        more = {"usage": {"prompt_tokens": prompt}, "cached_tokens": before}
        rows.append(row(name, ms, case="t", workload="multi_turn", turn=turn, **more))
    return rows


def pages(folder, rows, formats=("NVFP4", "Q4_K")):
    identities = {
        "new": known("new", runtime="vllm", format=formats[0], url="http://one"),
        "old": known("old", runtime="llama.cpp", format=formats[1], url="http://two"),
    }
    config = config_of(first_token={}, multi_turn={})
    aggregates = aggregate_records(rows, config, identities)
    for record in rows:
        record.prompt_sha256 = record.case
    (folder / "records.jsonl").write_bytes(
        b"".join(documents.encode_record(r) + b"\n" for r in rows)
    )
    bench = documents.Bench(config=config, backends=identities, aggregates=aggregates)
    documents.write(folder / "bench.json", bench)
    return report.compose(folder)


def test_the_ratio_of_cold_slopes_and_what_kernels_explain(tmp_path):
    files = pages(tmp_path, [*ladder("new", 100.0), *ladder("old", 310.0)])
    for name in ("report.md", "comparison.md"):
        text = files[name]
        assert "not cached: new 100 ms, old 310 ms; 3.10 times (3.10 to 3.10)" in text
        (line,) = [line for line in text.splitlines() if "What kernels explain" in line]
        assert "in W4A4" in line and "in W4A16" in line and "Qwen3.5-9B" in line
        assert "Limits this" not in text and "do not explain" not in text
    assert "What kernels explain" in files["report.html"]


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        (("MIXED_PRECISION", "Q4_K"), True),
        ((None, None), True),
        (("BF16", "Q4_K"), False),
        (("NVFP4", "Q8_0"), False),
    ],
)
def test_kernels_are_compared_where_the_formats_may_be_nvfp4_and_q4(tmp_path, formats, said):
    """A server in a container names a folder that is not on this machine, so its format is not known."""
    text = pages(tmp_path, [*ladder("new", 100.0), *ladder("old", 310.0)], formats)["report.md"]
    assert ("What kernels explain" in text) == said and "3.10 times" in text


def test_no_ratio_where_cached_tokens_are_not_known(tmp_path):
    files = pages(tmp_path, [*ladder("new", 100.0), *ladder("old", 310.0, cached=None)])
    text = files["comparison.md"]
    assert "No ratio of the first token of cold prompts: old does not report cached tokens" in text
    assert "310 ms;" not in text and "3.10 times" not in text
    assert "cached tokens not known" in text


def test_no_ratio_of_prompts_that_are_too_alike(tmp_path):
    rows = [r for name in ("new", "old") for r in ladder(name, 100.0)[:4]]
    text = pages(tmp_path, rows)["comparison.md"]
    assert "new has 4 cold prompts of 128–257 tokens" in text
    assert "annie-quant bench --workloads first" in text


def test_a_turn_that_kernels_do_not_explain_is_named_with_the_caches(tmp_path):
    """The original measurement: 134 against 1,608 ms in turn 5."""
    fast = talk("new", (92, 100, 110, 120, 134), 1.0)
    slow = talk("old", (300, 600, 900, 1200, 1608), 0.0)
    rows = [*ladder("new", 100.0), *ladder("old", 310.0), *fast, *slow]
    text = pages(tmp_path, rows)["comparison.md"]
    (line,) = [line for line in text.splitlines() if "do not explain" in line]
    assert line.startswith("- Turn 5: 12.0 times")
    assert "new had 3 200 of 3 400 tokens cached" in line.replace("\u202f", " ")
    assert "old had 0 of 3 400 tokens cached" in line.replace("\u202f", " ")
    (limit,) = [line for line in text.splitlines() if line.startswith("- Limits this")]
    assert "did not compute the same part" in limit
    assert "3 400 |" in text.replace("\u202f", " "), "prompt tokens of each turn"


def test_unknown_caches_are_not_shown_as_zero(tmp_path):
    rows = [
        *ladder("new", 100.0),
        *ladder("old", 310.0, cached=None),
        *talk("new", (90, 100, 110), 1.0),
        *talk("old", (300, 600, 3000), None),
    ]
    text = pages(tmp_path, rows)["comparison.md"]
    (line,) = [line for line in text.splitlines() if "do not explain" in line]
    assert "old had cached tokens that are not known" in line
    assert "not known" in text


def test_a_run_without_prompt_tokens_says_nothing(tmp_path):
    rows = [row(name, 30.0, case=str(i), usage=None) for name in ("new", "old") for i in range(3)]
    assert "First token and prompt tokens" not in pages(tmp_path, rows)["report.md"]


def test_kernels_explain_three_times_in_w4a4_and_a_quarter_in_w4a16():
    """../shared prefill facts: Q4_K_M over W4A4 3.1, over W4A16 1.26, at 2,048 tokens of Qwen3.5-9B."""
    ratios = kernel_ratios("vllm")
    assert ratios.ratios["W4A4"] == pytest.approx(3.1, abs=0.15)
    assert ratios.ratios["W4A16"] == pytest.approx(1.26, abs=0.05)
    assert ratios.largest < 12


def test_a_known_model_is_predicted_as_it_is_stored():
    shape = first_token.prefill().models["Qwen3.5-9B"]
    weights = shape.linear_weights

    def stored(w4a4):
        linears = {
            "w4a4": (w4a4 * weights, 0.5625 * w4a4 * weights),
            "w4a16": ((1 - w4a4) * weights, 0.5625 * (1 - w4a4) * weights),
        }
        return PromptWork(shape, linears, 2.0 * shape.head_weights)

    (half,) = kernel_ratios("vllm", stored(0.5), "mine").ratios.values()
    reference = kernel_ratios("vllm").ratios
    assert reference["W4A16"] < half < reference["W4A4"]
    small = msgspec.structs.replace(shape)
    tiny = PromptWork(small, {"w4a4": (1e6, 5e5)}, 1e5)
    assert kernel_ratios("vllm", tiny, "tiny").model == "Qwen3.5-9B"
    unknown = PromptWork(shape, {"no_such_kernel": (2e9, 1e9)}, 1e5)
    assert kernel_ratios("vllm", unknown, "odd").model == "Qwen3.5-9B"
    assert decode_speed.DEVICES["gb10"].name == first_token.prefill().device
