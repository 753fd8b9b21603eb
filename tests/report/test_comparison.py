"""comparison.md: dimensions of the original plan, cache sizes checked by hand, recommendations that speed alone never changes."""

from __future__ import annotations

import copy
import html
import json

import pytest
import report_fixture

from annie_quant.checkpoint.size import AttentionShape, caches_of
from annie_quant.documents import salvage_or_default
from annie_quant.judge import decision
from annie_quant.report import comparison, compose
from annie_quant.report.run import load

# Qwen3.5-9B's text model: every fourth of 32 layers attends fully.
QWEN = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 262144, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
GOOD = {"passes": 120, "n": 120, "low": 0.969, "high": 1.0, "threshold": 0.6, "verdict": "pass"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = report_fixture.make_run(
        tmp_path_factory.mktemp("comparison") / "run", n=8, hostile=False
    )
    return folder, json.loads((folder / "run.json").read_text())


def write(whole, tmp_path, change=None, records=True):
    folder, document = whole
    document = copy.deepcopy(document)
    if change:
        change(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    for name in ("records.jsonl", "inputs.json") if records else ():
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def candidate(document, metric="ttft_content_ms", change=-4.0, significant=True, n=30):
    """mlp_only passes everything, and differs from q4_k_m in one metric alone."""
    aggregates = document["aggregates"]
    document["verdict"] |= {"candidate": "mlp_only", "incumbent": "q4_k_m", "passed": True}
    for name in ("mlp_only", "q4_k_m"):
        for gate in aggregates["served"][name]["gates"]:
            aggregates["served"][name]["gates"][gate] = dict(GOOD)
        aggregates["served"][name]["memory_bytes"] = {
            "idle": 5e9,
            "one": 5e9,
            "five": 6e9,
            "source": "process_rss_bytes",
        }
    for side in aggregates["offline"]["mlp_only"].values():
        side["gates"] = {gate: dict(GOOD) for gate in side["gates"]}
    row = {
        "a": "q4_k_m",
        "b": "mlp_only",
        "workload": "all",
        "n_prompts": n,
        "median_a": 40.0,
        "median_b": 40.0 + change,
    }
    quiet = row | {
        "metric": "ttft_content_ms",
        "median_difference": 0.0,
        "low": -0.1,
        "high": 0.1,
        "significant": False,
    }
    change_row = row | {
        "metric": metric,
        "median_difference": change,
        "low": change - 1,
        "high": change + 1,
        "p_holm": 0.01 if significant else 0.4,
    }
    aggregates["comparisons"] = [change_row | {"significant": significant}]
    if metric != "ttft_content_ms":
        aggregates["comparisons"].append(quiet)


def advised(whole, tmp_path, change):
    """Return what to do next, by today's rule."""
    aggregates = load(write(whole, tmp_path, change)).aggregates
    names = {"incumbent": "q4_k_m"} if change else {}
    return decision.run_verdict(aggregates, "mlp_only" if change else None, **names).head[2]


def test_a_candidate_that_fails_a_gate_replaces_nothing(whole, tmp_path):
    assert advised(whole, tmp_path, None).startswith("Next: stay with ")


def test_a_significant_gain_without_a_loss_is_a_reason_to_switch(whole, tmp_path):
    assert advised(whole, tmp_path, candidate) == (
        "Next: switch from Q4_K_M to NVFP4 mlp_only: it is faster (content TTFT)."
    )


def test_decode_speed_alone_is_not_a_reason(whole, tmp_path):
    text = advised(whole, tmp_path, lambda d: candidate(d, "decode_tok_s", 25.0))
    assert text.startswith("Next: stay with Q4_K_M") and "decode speed alone is no reason" in text


def test_a_difference_that_is_not_significant_is_not_a_gain(whole, tmp_path):
    text = advised(whole, tmp_path, lambda d: candidate(d, significant=False))
    assert text.startswith("Next: stay with Q4_K_M")


def test_later_answers_keep_the_incumbent(whole, tmp_path):
    text = advised(whole, tmp_path, lambda d: candidate(d, change=9.0))
    assert text == "Next: stay with Q4_K_M: NVFP4 mlp_only is slower (content TTFT)."


def test_an_undecided_gate_asks_for_more_prompts(whole, tmp_path):
    def open_(document):
        candidate(document)
        document["aggregates"]["offline"]["mlp_only"]["w4a4"]["gates"]["tool_call"]["verdict"] = (
            "undecided"
        )

    text = advised(whole, tmp_path, open_)
    assert text.startswith("Next: stay with Q4_K_M; judge more ")


def test_over_the_budget_cannot_replace(whole, tmp_path):
    def huge(document):
        candidate(document)
        document["aggregates"]["served"]["mlp_only"]["memory_bytes"]["five"] = 111e9

    run = load(write(whole, tmp_path, huge))
    items = {item.item: item.verdict for item in comparison.checklist_items(run)}
    assert items["fits the memory budget"] == "fail"
    rows = dict(comparison.memory_budget(run).rows)
    assert [rows[k][2].text for k in rows] == ["✓ yes", "✗ no", "✗ no"] and list(rows)[
        -1
    ] == "both, while switching"


def test_the_change_of_operation_is_named(whole, tmp_path):
    def other_server(document):
        candidate(document)
        document["aggregates"]["served"]["mlp_only"]["runtime"] = "vllm"

    run = load(write(whole, tmp_path, other_server))
    text = " ".join(comparison.operation_changes(run))
    assert (
        "llama.cpp → vllm" in text
        and "container" in text
        and "--runtime vllm" in text
        and "way back" in text
    )
    cells = dict(comparison.dimensions(run).rows)
    assert [c.text for c in cells["deployment"]] == [
        "one binary and one GGUF file",
        "vLLM from its container image",
    ]
    assert cells["acceleration"][1].text == "FP4 tensor cores on Blackwell"


def test_every_dimension_of_the_original_plan_is_there(whole, tmp_path):
    rows = [name for name, _ in comparison.dimensions(load(write(whole, tmp_path))).rows]
    for dimension in (
        "runtime",
        "fine-tuning",
        "quantization",
        "memory",
        "cache",
        "decode",
        "TTFT",
        "deployment",
        "context",
        "accel",
    ):
        assert any(dimension in row for row in rows), dimension


def test_caches_by_hand(tmp_path):
    caches = caches_of(AttentionShape(**QWEN))
    keys = 8 * 2 * 4 * 256 * 2  # layers, keys and values, heads, dimension, bytes
    states = 24 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)
    assert caches.stored(32768) == 32768 * keys + states and 1.0e9 < caches.stored(32768) < 1.2e9
    assert (
        caches.at(4096) == 4096 * keys
        and caches_of(AttentionShape(**QWEN), element=1).at(1) == keys // 2
    )
    assert caches_of(AttentionShape()).stored(32768) == 0
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN | {"head_dim": "x"}}))
    assert caches_of(salvage_or_default(AttentionShape, tmp_path / "config.json")).position == 0


def test_the_cache_is_computed_from_the_model_of_the_run(whole, tmp_path):
    folder = write(whole, tmp_path, candidate)
    (folder / "models" / "mlp_only").mkdir(parents=True)
    (folder / "models" / "mlp_only" / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": QWEN})
    )
    cells = dict(comparison.dimensions(load(folder)).rows)
    assert next(v for k, v in cells.items() if "cache" in k)[1].text.startswith("1.1")
    assert cells["context limit"][1].text == "262\u202f144 tokens"


def test_without_servers_nothing_is_recommended(whole, tmp_path):
    def bare(document):
        document["aggregates"]["served"] = {}

    folder = write(whole, tmp_path, bare, records=False)
    files = compose(folder)
    assert (
        "nothing to compare yet" in files["comparison.md"]
        and "## Side by side" not in files["comparison.md"]
    )
    assert 'id="replacement"' not in files["report.html"]


def test_document_and_page_agree(whole, tmp_path):
    run = write(whole, tmp_path, candidate)
    files = compose(run)
    sentence = load(run).sentence
    for text in (files["comparison.md"].replace("\\", ""), html.unescape(files["report.html"])):
        assert sentence in text and "both, while switching" in text
