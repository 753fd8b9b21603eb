"""The comparison document: founding dimensions from the run, caches computed by hand, advice that speed alone never turns."""

from __future__ import annotations

import copy
import json

import pytest
import report_fixture

from annie_quant.report import compose
from annie_quant.report.pages import advice, comparison
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
    folder = report_fixture.make_run(tmp_path_factory.mktemp("comparison") / "run", n=8, hostile=False)
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
    told = row | {"metric": metric, "median_difference": change, "low": change - 1, "high": change + 1}
    aggregates["comparisons"] = [told | {"significant": significant}]
    if metric != "ttft_content_ms":
        aggregates["comparisons"].append(quiet)


def advised(whole, tmp_path, change):
    return advice.recommendation(load(write(whole, tmp_path, change)))


def test_a_candidate_that_fails_a_gate_is_not_recommended(whole, tmp_path):
    said = advised(whole, tmp_path, None)
    assert said.action == "stay" and "fails" in said.sentence and "tool" in said.sentence


def test_a_sure_gain_without_a_loss_is(whole, tmp_path):
    said = advised(whole, tmp_path, candidate)
    assert said.action == "switch" and any("content TTFT -4 of 40 ms, 30 prompts" in r for r in said.reasons)


def test_tokens_a_second_alone_are_no_reason(whole, tmp_path):
    said = advised(whole, tmp_path, lambda d: candidate(d, "decode_tok_s", 25.0))
    assert said.action == "stay" and "does not justify" in said.sentence


@pytest.mark.parametrize("change", [{"significant": False}, {"change": -1.0}])
def test_a_difference_that_is_not_sure_or_small_is_no_gain(whole, tmp_path, change):
    assert advised(whole, tmp_path, lambda d: candidate(d, **change)).action == "stay"


def test_a_loss_beside_a_gain_is_left_to_the_reader(whole, tmp_path):
    def mixed(document):
        candidate(document)
        document["aggregates"]["served"]["mlp_only"]["memory_bytes"]["five"] = 9e9

    said = advised(whole, tmp_path, mixed)
    assert said.action == "wait" and any("loss: memory 9 GB" in r for r in said.reasons)


def test_later_answers_keep_the_incumbent(whole, tmp_path):
    said = advised(whole, tmp_path, lambda d: candidate(d, change=9.0))
    assert said.action == "stay" and "answers no later" in said.sentence


def test_an_undecided_gate_waits(whole, tmp_path):
    def open_(document):
        candidate(document)
        document["aggregates"]["offline"]["mlp_only"]["w4a4"]["gates"]["tool_call"]["verdict"] = "undecided"

    said = advised(whole, tmp_path, open_)
    assert said.action == "wait" and "W4A4" in said.sentence


def test_over_the_budget_is_no_drop_in(whole, tmp_path):
    def huge(document):
        candidate(document)
        document["aggregates"]["served"]["mlp_only"]["memory_bytes"]["five"] = 111e9

    run = load(write(whole, tmp_path, huge))
    assert advice.recommendation(run).action == "stay"
    rows = dict(comparison.registry(run).rows)
    assert [rows[k][2].text for k in rows] == ["✓ yes", "✗ no", "✗ no"] and list(rows)[-1] == "both, while switching"


def test_the_change_of_operation_is_named(whole, tmp_path):
    def other_server(document):
        candidate(document)
        document["aggregates"]["served"]["mlp_only"]["runtime"] = "vllm"

    run = load(write(whole, tmp_path, other_server))
    said = " ".join(advice.recommendation(run).operation)
    assert "llama.cpp → vllm" in said and "container" in said and "--runtime vllm" in said and "way back" in said
    cells = dict(comparison.founding_table(run).rows)
    assert [c.text for c in cells["deployment"]] == ["one binary and one GGUF file", "vLLM from its container image"]
    assert cells["acceleration"][1].text == "FP4 tensor cores on Blackwell"


def test_every_founding_dimension_is_there(whole, tmp_path):
    rows = [name for name, _ in comparison.founding_table(load(write(whole, tmp_path))).rows]
    for wanted in (
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
        assert any(wanted in row for row in rows), wanted


def test_caches_by_hand():
    tokens, found = comparison.cache_bytes(QWEN)
    keys = 8 * 32768 * 2 * 4 * 256 * 2  # layers, tokens, keys and values, heads, dimension, bytes
    states = 24 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)
    assert (tokens, found) == (32768, keys + states) and 1.0e9 < found < 1.2e9
    assert comparison.cache_bytes(QWEN | {"max_position_embeddings": 4096})[0] == 4096
    assert comparison.cache_bytes({}) is None and comparison.cache_bytes(QWEN | {"head_dim": "x"}) is None


def test_the_cache_is_read_from_the_model_of_the_run(whole, tmp_path):
    folder = write(whole, tmp_path, candidate)
    (folder / "models" / "mlp_only").mkdir(parents=True)
    (folder / "models" / "mlp_only" / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": QWEN})
    )
    cells = dict(comparison.founding_table(load(folder)).rows)
    assert next(v for k, v in cells.items() if "cache" in k)[1].text.startswith("1.1")
    assert cells["context limit"][1].text == "262\u202f144 tokens"


def test_the_tree_walks_the_founding_order_and_names_what_failed(whole, tmp_path):
    steps = advice.decision_tree(load(write(whole, tmp_path, candidate)))
    assert [s.text.split(":")[0] for s in steps] == ["NVFP4 naive", "NVFP4 mlp_only"]
    assert steps[0].verdict == "fail" and steps[1].verdict == "pass" and steps[1].text.endswith("the candidate")
    w4a4 = next(s for s in steps[0].children if "W4A4" in s.text)
    assert w4a4.verdict == "fail" and "50/120" in w4a4.text


def test_the_order_of_a_search_is_the_tree_s(whole, tmp_path):
    folder = write(whole, tmp_path, candidate)
    (folder / "search.json").write_text(json.dumps({"strategies": [{"strategy": "mlp_only"}, {"strategy": "naive"}]}))
    assert [s.text.split(":")[0] for s in advice.decision_tree(load(folder))] == ["NVFP4 mlp_only", "NVFP4 naive"]


def test_without_servers_nothing_is_recommended(whole, tmp_path):
    def bare(document):
        document["aggregates"]["served"] = {}

    folder = write(whole, tmp_path, bare, records=False)
    said = compose(folder)
    assert "nothing to compare yet" in said["comparison.md"] and "## Recommendation" not in said["comparison.md"]
    assert 'id="recommendation"' not in said["report.html"] and 'id="decisions"' in said["report.html"]


def test_document_and_page_say_the_same(whole, tmp_path):
    run = write(whole, tmp_path, candidate)
    files, said = compose(run), advice.recommendation(load(run))
    for text in (files["comparison.md"].replace("\\", ""), files["report.html"]):
        assert said.sentence in text and "both, while switching" in text and "passes every gate, the candidate" in text
