"""A run with missing parts still gives a report, which names each missing part and the command that makes it."""

from __future__ import annotations

import json

import pytest
import report_fixture
import report_page

from annie_quant import report
from annie_quant.core.errors import UsageError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return report_fixture.make_run(tmp_path_factory.mktemp("missing") / "run", n=4, hostile=False)


def variant(whole, folder, change, records=True):
    """A copy of the run with its run.json changed (None: without one)."""
    document = json.loads((whole / "run.json").read_text())
    document = change(document)
    if document is not None:
        (folder / "run.json").write_text(json.dumps(document))
    if records:
        for name in ("records.jsonl", "inputs.json"):
            (folder / name).write_bytes((whole / name).read_bytes())
    files = report.compose(folder)
    return files, "".join(report_page.Read(files["report.html"]).text)


def drop(*path):
    def change(document):
        place = document
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return document

    return change


def test_a_whole_run_misses_nothing(whole, tmp_path):
    files, text = variant(whole, tmp_path, lambda d: d)
    assert "Not in this run" not in text and "Not in this run" not in files["report.md"]


def test_a_model_has_both_halves_of_its_predicted_speed(whole, tmp_path):
    def predicted(document):
        row = document["aggregates"]["models"][1]
        row["predicted"] = {"device": "NVIDIA GB10", "read_bytes": 1, "tok_s": 41.5}
        first_token = {"device": "NVIDIA GB10", "server": "vllm", "ms": 278.6}
        sizes = {"prompt_tokens": 512, "cached_tokens": 0, "low_ms": 226.2, "high_ms": 362.4}
        row["first_token"] = first_token | sizes
        return document

    files, text = variant(whole, tmp_path, predicted)
    for page in (files["report.md"], text):
        assert "decode, tok/s (predicted)" in page and "first token, ms (predicted)" in page
        assert "279 (226 to 362) at 512 tokens, NVIDIA GB10" in page
    _, plain = variant(whole, tmp_path, lambda document: document)
    assert "first token, ms (predicted)" not in plain


def test_both_pages_explain_why_the_verdicts_times_differ_from_the_tables(whole, tmp_path):
    files, text = variant(whole, tmp_path, lambda d: d)
    assert all(
        "the verdict compares two sides over the prompts that both answered" in page
        for page in (text, files["report.md"])
    )


@pytest.mark.parametrize(
    ("path", "words", "command"),
    [
        (
            ("aggregates", "offline"),
            "No evaluation without a server",
            "annie-quant eval MODEL_DIR --reference BF16_DIR",
        ),
        (("aggregates", "served"), "No paired comparison", "annie-quant bench"),
        (("aggregates", "comparisons"), "No paired comparison was made", "annie-quant bench"),
        (("aggregates", "models"), "No table of models", "annie-quant audit MODEL_DIR"),
    ],
)
def test_a_missing_part_is_named_with_its_command(whole, tmp_path, path, words, command):
    def change(document):
        document = drop(*path)(document)
        if path[-1] == "served":
            document["aggregates"]["comparisons"] = []
        return document

    files, text = variant(whole, tmp_path, change)
    assert words in text and command in text
    assert "Not in this run" in files["report.md"] and command.split()[1] in files["report.md"]


def test_memory_and_kl_missing(whole, tmp_path):
    def change(document):
        for side in document["aggregates"]["served"].values():
            side["memory_bytes"] = None
        for side in document["aggregates"]["offline"].values():
            for result in side.values():
                result["kl"] = None
        return document

    _, text = variant(whole, tmp_path, change)
    assert (
        "Memory of the servers was not measured" in text and "No KL divergence was measured" in text
    )


def test_without_records_the_tables_stay(whole, tmp_path):
    files, text = variant(whole, tmp_path, lambda d: d, records=False)
    assert "No records.jsonl" in text and "Side by side" in text
    page = report_page.Read(files["report.html"])
    assert any(k == "gate|served/naive|tool_call" for k, *_ in page.shown)


def test_records_alone_give_rates_and_percentiles(whole, tmp_path):
    """A benchmark that was killed before it wrote its figures."""
    files, text = variant(whole, tmp_path, lambda d: None)
    shown = {k: first for k, first, _ in report_page.Read(files["report.html"]).shown}
    rows = [json.loads(line) for line in (whole / "records.jsonl").open()]
    checks = [
        r["checks"]["tool_call"]
        for r in rows
        if r["backend"] == "q4_k_m" and "tool_call" in r["checks"]
    ]
    assert shown["gate|served/q4_k_m|tool_call"].startswith(f"{sum(checks)}/{len(checks)}")
    assert "No verdict has been reached" in text and "annie-quant demo" in text


def test_an_evaluation_alone_gives_its_gates(whole, tmp_path):
    side = json.loads((whole / "run.json").read_text())["aggregates"]["offline"]
    (tmp_path / "eval").mkdir()
    evaluation = {"numerics": side["naive"], "reference_gates": side["bf16"]["bf16"]["gates"]}
    (tmp_path / "eval" / "naive.json").write_text(
        json.dumps(evaluation)
    )  # what of a damaged file still fits
    shown = {
        k: first for k, first, _ in report_page.Read(report.compose(tmp_path)["report.html"]).shown
    }
    assert shown["gate|offline/naive/w4a4|tool_call"].startswith("50/120")
    assert shown["gate|offline/bf16/bf16|tool_call"].startswith("120/120")


def test_impossible_times_are_a_caveat(whole, tmp_path):
    """llama.cpp reports its own time; an answer that the client received sooner proves a wrong clock."""
    rows = [json.loads(line) for line in (whole / "records.jsonl").open()]
    for index, row in enumerate(rows):
        share = 0.5 if index in (0, 1, 2) else 1.1
        row["server_timings"] = {"prompt_ms": 2.0, "predicted_ms": row["e2e_ms"] / share - 2.0}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = report.compose(tmp_path)["report.md"]
    assert (
        text.count("requests ended, by the client's clock") == 1
        and f"- 0 of {len(rows)}" not in text
    )
    early = sum(
        not r["warmup"] and r["server_timings"]["predicted_ms"] + 2 > r["e2e_ms"] * 1.25
        for r in rows
    )
    assert f"- {early} of {len(rows) - 4} requests" in text and early == 3


def test_unreadable_lines_are_counted_and_named(whole, tmp_path):
    (tmp_path / "records.jsonl").write_bytes(
        (whole / "records.jsonl").read_bytes()[:-40] + b"\nnot json\n[1]\n"
    )
    files = report.compose(tmp_path)
    n = (whole / "records.jsonl").read_bytes().count(b"\n")
    for text in (files["report.md"], files["report.html"]):
        assert "3 lines of records.jsonl could not be read" in text
        assert all(f"line {number}: " in text for number in (n, n + 1, n + 2)), (
            "one message per line"
        )


def test_a_folder_without_a_run_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="neither run"):
        report.build(tmp_path)
    with pytest.raises(UsageError, match="no such run directory"):
        report.build(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{torn")
    with pytest.raises(UsageError, match="not JSON"):
        report.build(tmp_path)


def test_nothing_is_half_written(whole, tmp_path, monkeypatch):
    """A disk that fills up in the middle leaves the report of before."""
    from annie_quant.core import files

    (tmp_path / "run.json").write_bytes((whole / "run.json").read_bytes())
    report.build(tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        report.build(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))
