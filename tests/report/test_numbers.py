"""Every number in the report is counted again here from records.jsonl (offline ones: from run.json)."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
from collections import defaultdict

import numpy as np
import pytest
import report_fixture
import report_page
from command_line import CliRunner
from paths import DATA

from annie_quant import report
from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError

FIELD = {
    "ttft_content_ms": "first_content_ms",
    "ttft_tool_ms": "first_tool_ms",
    "itl_ms": "itl_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
    "decode_tok_s": "decode_tok_s",
    "completion_tokens": "completion_tokens",
}
SCALE = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = report_fixture.make_run(tmp_path_factory.mktemp("report") / "run", n=25)
    paths = report.build(folder)
    records = [json.loads(line) for line in (folder / "records.jsonl").open(encoding="utf-8")]
    return {
        "folder": folder,
        "paths": paths,
        "records": [r for r in records if not r["warmup"]],
        "run": json.loads((folder / "run.json").read_text()),
        "page": report_page.Read((folder / "report.html").read_text(encoding="utf-8")),
    }


def recount(run, key: str) -> float | tuple[int, int]:
    """The value of a cell, from its key and the records alone."""
    kind, *rest = key.split("|")
    document = run["run"]
    if kind == "gate":
        side, gate = rest
        where, name, *numerics = side.split("/")
        if where == "offline":
            row = document["aggregates"]["offline"][name][numerics[0]]["gates"][gate]
            return row["passes"], row["n"]
        checks = [
            r["checks"][gate]
            for r in run["records"]
            if r["backend"] == name and gate in r["checks"]
        ]
        return sum(checks), len(checks)
    if kind == "rate":
        passes, n = recount(run, "gate|" + "|".join(rest))
        return 100 * passes / n
    if kind in ("metric", "speed"):
        name, workload, metric, stat = (
            (rest[0].split("/")[1], *rest[1:])
            if kind == "metric"
            else (
                rest[0].split("/")[1],
                None,
                {"ttft": "ttft_content_ms", "decode": "decode_tok_s"}[rest[1]],
                "p50",
            )
        )
        values = []
        for r in run["records"]:
            if (
                r["backend"] == name
                and workload in (None, r["workload"])
                and not r["error"]
                and r[FIELD[metric]] is not None
            ):
                values += r[FIELD[metric]] if metric == "itl_ms" else [r[FIELD[metric]]]
        return float(np.percentile(values, float(stat[1:])))
    if kind in ("size", "bits"):
        model = next(m for m in document["aggregates"]["models"] if m["name"] == rest[0])
        return model["size_bytes" if kind == "size" else "bits_per_weight"]
    if kind == "memory":
        levels = document["aggregates"]["served"][rest[0].split("/")[1]]["memory_bytes"]
        return (
            levels[rest[1]]
            if rest[1] in levels
            else max(levels[k] for k in ("idle", "one", "five"))
        )
    if kind in ("kl", "perplexity"):
        _, name, numerics = rest[0].split("/")
        side = document["aggregates"]["offline"][name][numerics]
        return (
            side["perplexity"]
            if kind == "perplexity"
            else side["kl"][rest[1]] * (100 if rest[1] == "same_top" else 1)
        )
    if kind == "cmp":
        row = document["aggregates"]["comparisons"][int(rest[0])]
        by_case = defaultdict(dict)
        for r in run["records"]:
            own = row["workload"] in (r["workload"], "all")
            if own and not r["error"] and r[FIELD[row["metric"]]] is not None:
                by_case[r["case"], r["turn"]][r["backend"]] = r[FIELD[row["metric"]]]
        pairs = np.array(
            [
                (s[row["a"]], s[row["b"]])
                for s in by_case.values()
                if {row["a"], row["b"]} <= s.keys()
            ]
        )
        return {
            "n_prompts": len(pairs),
            "median_a": np.median(pairs[:, 0]),
            "median_b": np.median(pairs[:, 1]),
            "median_difference": np.median(pairs[:, 1] - pairs[:, 0]),
            "p_holm": row["p_holm"],
        }[rest[1]]
    raise AssertionError(f"unknown kind of figure: {key}")


def test_every_shown_figure_equals_its_recount(run):
    wrong, kinds = [], defaultdict(int)
    for key, first, _ in run["page"].shown:
        kind = key.split("|")[0]
        if kind in ("check", "stage", "interval") or first.strip() == "—":
            continue
        kinds[kind] += 1
        expected = recount(run, key)
        if kind == "gate":
            if re.match(r"(\d+)/(\d+)", first.replace("\u202f", "")).groups() != (
                str(expected[0]),
                str(expected[1]),
            ):
                wrong.append((key, first, expected))
            continue
        unit = SCALE.get(first.split()[-1], 1.0) if kind in ("size", "memory") else 1.0
        value, slack = report_page.first_number(first)
        if abs(value * unit - expected) > slack * unit:
            wrong.append((key, first, expected))
    assert not wrong, wrong[:10]
    assert (
        kinds["gate"] > 150 and kinds["metric"] > 400 and kinds["cmp"] == 200 and kinds["kl"] == 24
    ), dict(kinds)


def test_the_shown_answers_are_those_of_the_records(run):
    from annie_quant.core.text import visible
    from annie_quant.report import pages
    from annie_quant.report.run import load

    by_key = {
        (r["workload"].replace("_", " "), r["case"], r["turn"], r["backend"]): r
        for r in run["records"]
    }
    browser = pages.collect(load(run["folder"]))
    assert len(browser.prompts) == 240 and browser.total == 25 * 12
    failed = {
        (r["workload"], r["case"], r["turn"])
        for r in run["records"]
        if not all(r["checks"].values())
    }
    assert browser.faulty == len(failed) == sum(bool(p.gates) for p in browser.prompts), (
        "every fault is shown"
    )
    repeated = 0
    for prompt in browser.prompts:
        for shown in prompt.answers:
            record = by_key[prompt.workload, prompt.case, prompt.turn, shown.record.backend]
            assert "".join(piece for piece, _ in shown.pieces).startswith(
                visible(record["text"][:800])
            )
            assert shown.record.answer.completion_tokens == record["completion_tokens"]
            assert shown.record.timings.first_content_ms == record["first_content_ms"]
            assert len(shown.faults) == sum(not ok for ok in record["checks"].values())
            if shown.same_as:
                repeated += 1
                twin = next(a for a in prompt.answers if a.label == shown.same_as)
                assert twin.pieces == shown.pieces and not twin.same_as
    assert repeated > 20


def test_the_checklist_agrees_with_the_records(run):
    """The candidate (naive) against the incumbent (Q4_K_M), each line from the records."""
    text = (run["folder"] / "report.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("- [")]
    own = [r for r in run["records"] if r["backend"] == "naive"]
    calls = [r["checks"]["tool_call"] for r in own if "tool_call" in r["checks"]]
    assert (
        f"- [x] speaks the OpenAI API ({len(own)} of {len(own)} chat completions succeeded)"
        in lines
    )
    assert f"- [x] calls tools ({sum(calls)} of {len(calls)}, served)" in lines
    assert any("answers no later (content TTFT -" in line for line in lines)
    assert any(
        line.startswith("- [ ] **no:** answers no worse (loses no markdown on the same prompts")
        for line in lines
    )
    assert any("start script" in line and "open:" in line for line in lines)


def test_a_changed_number_would_be_caught(run, tmp_path):
    """Negative control: both the page's check and this test's find a figure that was edited in run.json."""
    changed = json.loads((run["folder"] / "run.json").read_text())
    changed["aggregates"]["served"]["naive"]["gates"]["tool_call"]["passes"] += 1
    changed["aggregates"]["served"]["bf16"]["workloads"]["greeting"]["ttft_content_ms"]["p50"] *= (
        1.05
    )
    for name in ("records.jsonl", "inputs.json"):
        (tmp_path / name).write_bytes((run["folder"] / name).read_bytes())
    (tmp_path / "run.json").write_text(json.dumps(changed))
    report.build(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 figures differ from the records" in text and "naive: tool_call, passes" in text
    page = report_page.Read(text)
    shown = next(first for key, first, _ in page.shown if key == "gate|served/naive|tool_call")
    assert not shown.startswith("/".join(map(str, recount(run, "gate|served/naive|tool_call"))))
    assert "DIFFERS" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_self_check_is_shown_and_clean(run):
    text = next(first for key, first, _ in run["page"].shown if key == "check")
    same, of = map(int, re.match(r"(\d+) of (\d+)", text).groups())
    assert same == of > 200


def test_a_real_benchmark_and_its_report_agree(tmp_path):
    """bench's own figures over real streams, repeats and conversations, against the report's recount of the records."""
    from fake_server import FakeServer, words

    from annie_quant import bench
    from annie_quant.judge.library import build_workload

    workloads = [
        build_workload(
            {"name": name, "max_tokens": 50, "gates": ["non_empty", "no_markdown"], "cases": cases}
        )
        for name, cases in (
            (
                "factual",
                [
                    {"id": str(i), "messages": [{"role": "user", "content": f"{i}?"}]}
                    for i in range(4)
                ],
            ),
            ("multi_turn", [{"id": "t", "turns": ["one", "two", "three"]}]),
        )
    ]

    def sometimes_bold(body):
        return words(
            "**Tokyo** it is." if "2" in body["messages"][-1]["content"] else "It is Tokyo.",
            first_s=0.02,
            gap_s=0.002,
        )

    with (
        FakeServer(sometimes_bold) as a,
        FakeServer(lambda body: words("It is Tokyo.", first_s=0.02, gap_s=0.001)) as b,
    ):
        sides = [bench.Backend("left", a.url), bench.Backend("right", b.url)]
        bench.run(sides, workloads, tmp_path, warmup=1, runs=3, with_memory=False)
    files = report.compose(tmp_path)
    page = report_page.Read(files["report.html"])
    shown = {key: first for key, first, _ in page.shown}
    assert shown["gate|served/left|no_markdown"].startswith("6/7")
    assert shown["gate|served/right|no_markdown"].startswith("7/7")
    same, of = map(int, re.match(r"(\d+) of (\d+)", shown["check"]).groups())
    assert same == of > 8, [line for line in files["report.md"].splitlines() if "DIFFERS" in line]
    assert "left" in files["report.md"] and "right" in files["report.md"], (
        "one model behind two servers: both are named"
    )


def test_every_cell_with_a_number_has_a_key(run):
    """The tests above check every figure: in the main table a cell with a digit has a key."""
    html = (run["folder"] / "report.html").read_text(encoding="utf-8")
    table = html[html.index('<section id="side-by-side"') : html.index('<section id="gates"')]
    cells = re.findall(r"<td([^>]*)>([^<]*)", table)
    assert len(cells) > 80
    assert all("data-k" in attributes for attributes, text in cells if re.search(r"\d", text))


def test_results_csv_holds_the_same_figures(run):
    with (run["folder"] / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    gates = [r for r in rows if r["metric"].startswith("gate:") and r["part"] == "served"]
    assert len(gates) > 30
    for r in gates:
        passes, n = recount(run, f"gate|served/{r['where']}|{r['metric'][5:]}")
        assert (int(r["passes"]), int(r["n"])) == (passes, n) and float(r["mean"]) == pytest.approx(
            passes / n
        )
    for r in rows:
        if r["metric"] in FIELD:
            for stat in ("p50", "p99"):
                assert float(r[stat]) == pytest.approx(
                    recount(
                        run, f"metric|served/{r['where']}|{r['workload']}|{r['metric']}|{stat}"
                    ),
                    rel=1e-6,
                )


def test_markdown_tables_hold_the_same_gates(run):
    text = (run["folder"] / "report.md").read_text(encoding="utf-8")
    line = next(li for li in text.splitlines() if li.startswith("| tool calls "))
    order = [
        f"offline/{m}/{n}" if n else f"served/{m}"
        for m, n in (
            ("bf16", "bf16"),
            ("bf16", ""),
            ("naive", "w4a4"),
            ("naive", "w4a16"),
            ("naive", ""),
            ("mlp_only", "w4a4"),
            ("mlp_only", "w4a16"),
            ("mlp_only", ""),
            ("q4_k_m", ""),
        )
    ]
    expected = ["/".join(map(str, recount(run, f"gate|{side}|tool_call"))) for side in order]
    assert re.findall(r"\d+/\d+", line) == expected


def test_the_facts_of_a_run_have_plain_titles(run):
    from annie_quant.report import run as run_module
    from annie_quant.report import tables

    titles = [title for title, _ in tables.facts(run_module.load(run["folder"]))]
    assert titles == ["Command", "Environment", "Settings"]


def test_plots_are_files_of_their_own(run):
    import xml.etree.ElementTree as tree

    drawn = sorted((run["folder"] / "plots").glob("*.svg"))
    assert {"gates-tool-call.svg", "turns.svg", "crossover.svg"} <= {p.name for p in drawn}
    for path in drawn:
        root = tree.parse(path).getroot()
        assert root.tag.endswith("svg") and root.find("{http://www.w3.org/2000/svg}title").text


def test_a_ladder_has_its_counts_and_its_cliff(run):
    page = (run["folder"] / "report.html").read_text(encoding="utf-8")
    table = page[page.index("<h3>Ladders</h3>") :]
    table = table[: table.index("</table>")]
    for passes in (15, 14, 3):
        assert f"{passes}/15" in table
    # From the cliff on: one cell per backend.
    assert table.count("3/15 ✗") == table.count("✗") - table.split("<tbody>")[0].count("✗") == 2


def test_thousands_of_records_give_a_page_of_limited_size(tmp_path, monkeypatch):
    from annie_quant.report import run as run_module

    calls = []
    convert = run_module.documents.salvage_record
    monkeypatch.setattr(
        run_module.documents, "salvage_record", lambda *args: calls.append(1) or convert(*args)
    )
    folder = report_fixture.make_run(tmp_path / "large", n=60)
    lines = (folder / "records.jsonl").read_bytes().count(b"\n")
    assert lines >= 2_500
    report.build(folder)
    assert len(calls) == lines, "each record is decoded once"
    size = (folder / "report.html").stat().st_size
    assert size < 3_000_000, size
    text = (folder / "report.html").read_text(encoding="utf-8")
    shown, total = map(int, re.search(r"(\d+) of (\d+) prompts are here", text).groups())
    assert shown == text.count('<article class="prompt') <= 240 < total, (
        "only some answers are in the page, which states it"
    )


def test_verify_counts_again(run, tmp_path):
    check = report.verify(run["folder"])
    assert check.compared > 200 and check.differences == []
    changed = json.loads(json.dumps(run["run"]))
    changed["aggregates"]["served"]["naive"]["gates"]["tool_call"]["passes"] += 1
    (tmp_path / "run.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="no served figures with records"):
        report.verify(tmp_path)
    (tmp_path / "records.jsonl").write_bytes((run["folder"] / "records.jsonl").read_bytes())
    (difference,) = report.verify(tmp_path).differences
    assert (
        difference.figure == "naive: tool_call, passes"
        and difference.reported == difference.counted + 1
    )
    for folder, code in ((run["folder"], 0), (tmp_path, 1)):
        result = CliRunner().invoke(cli, ["report", str(folder), "--verify"])
        assert result.exit_code == code and ("naive: tool_call, passes: " in result.output) == bool(
            code
        )
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("stored", sorted((DATA / "runs").iterdir()), ids=lambda p: p.name)
def test_runs_of_every_version_give_a_report(stored, tmp_path):
    folder = shutil.copytree(stored, tmp_path / "run")
    report.build(folder)
    page = report_page.Read((folder / "report.html").read_text(encoding="utf-8"))
    shown = {key: first for key, first, _ in page.shown}
    assert shown["gate|served/a|factual"].startswith("3/3")
    same, of = map(int, re.match(r"(\d+) of (\d+)", shown["check"]).groups())
    assert same == of > 8


def test_tick_labels_differ():
    from annie_quant.report import svg

    assert [svg.plain(v) for v in (5e-4, 1e-5, 0.002, 1e-3)] == ["5·10⁻⁴", "10⁻⁵", "0.002", "0.001"]
    for low, high in ((1e-4, 1e-2), (1e-5, 1.0), (1.0, 100.0), (10.0, 50.0)):
        marks = svg.log_ticks(low, high)
        assert 2 <= len(marks) <= 5 and len({svg.plain(v) for v in marks}) == len(marks)


def test_what_is_drawn_lies_inside_its_drawing(run):
    """Positions, and the start of texts that end at theirs; a character is at least 4.6 pixels wide at 11.5 pixels per em."""
    outside = []
    for path in sorted((run["folder"] / "plots").iterdir()):
        drawing = path.read_text(encoding="utf-8")
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups())
        places = [
            (float(a), float(b))
            for a, b in re.findall(r'\bc?x="([\d.-]+)" c?y="([\d.-]+)"', drawing)
        ]
        places += [(float(a), float(b)) for a, b in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", drawing)]
        ends = re.findall(
            r'<text x="([\d.-]+)" y="([\d.-]+)" class="[^"]*\be\b[^"]*">([^<]*)', drawing
        )
        places += [(float(a) - 4.6 * len(html.unescape(text)), float(b)) for a, b, text in ends]
        assert places, path.name
        outside += [
            (path.name, place)
            for place in places
            if not (-1 <= place[0] <= width + 1 and 0 <= place[1] <= height)
        ]
    assert outside == []


def test_plots_of_an_earlier_report_are_removed(run, tmp_path):
    folder = shutil.copytree(run["folder"], tmp_path / "run")
    (folder / "plots" / "gates-old.svg").write_text("<svg/>")
    names = {p.name for p in (run["folder"] / "plots").iterdir()}
    report.build(folder)
    assert {p.name for p in (folder / "plots").iterdir()} == names


def test_divergence_by_layer_is_drawn_from_the_sensitivities(run, tmp_path):
    folder = shutil.copytree(run["folder"], tmp_path / "run")
    alone = {
        f"layers.{i}.{part}": {"mean": 0.001 * (i + 1), "n_tokens": 50}
        for i in range(3)
        for part in ("mlp", "self_attn")
    }
    (folder / "sensitivity").mkdir()
    (folder / "sensitivity" / "naive.json").write_text(
        json.dumps({"numerics": "w4a4", "all": {}, "alone": alone})
    )
    report.build(folder)
    drawn = (folder / "plots" / "kl-by-layer.svg").read_text()
    assert drawn.count("<title>NVFP4 naive W4A4 offline: 0.00") == 6 and "2 self attn" in drawn
    assert not (run["folder"] / "plots" / "kl-by-layer.svg").exists()


def test_a_wrong_call_is_marked_and_a_right_one_is_not(run, tmp_path):
    folder = shutil.copytree(run["folder"], tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "records.jsonl").open(encoding="utf-8")]
    wrong = next(r for r in rows if r["checks"].get("tool_call") is False and not r["warmup"])
    wrong["tool_calls"] = [{"id": "c1", "name": "delete_memory", "arguments": "{}"}]
    (folder / "records.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    page = report.compose(folder)["report.html"]
    assert re.findall(r"→ <mark>(\w+)", page) == ["delete_memory"] and "→ search_memory(" in page
