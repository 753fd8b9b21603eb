"""Text from a model cannot act in the report: no tag, no script, no control or direction character."""

from __future__ import annotations

import json
import unicodedata

import msgspec
import pytest
import report_fixture
import report_page
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import report
from annie_quant.core.text import inert, visible
from annie_quant.documents.statistics import SpeedGate
from annie_quant.report import pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = report_fixture.make_run(tmp_path_factory.mktemp("hostile") / "run", n=4)
    report.build(run)
    return run


def steering(text: str) -> list[str]:
    """Control and direction characters, by Unicode's own categories."""
    return [
        ch
        for ch in text
        if (unicodedata.category(ch) in ("Cc", "Cs") and ch not in "\n\t")
        or unicodedata.bidirectional(ch)
        in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    ]


def test_hostile_answers_are_text(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    page = report_page.Read(html)
    assert page.tags.count("script") == 1 and page.tags.count("style") == 1
    assert not {"img", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert [a for t, k, a in page.attributes if k.startswith("on")] == []
    text = "".join(page.text)
    assert "<script>document.title='owned'</script>" in text, "the answer is shown as it was"
    assert "⟨U+0000⟩" in text and "⟨U+202E⟩" in text and "⟨U+D800⟩" in text and "مرحبا" in text
    assert "{{ 7*7 }}" in text, "no template runs over an answer"
    for name in ("report.html", "report.md"):
        assert steering((folder / name).read_text(encoding="utf-8")) == [], name


def test_links_lead_nowhere_outside(folder):
    page = report_page.Read((folder / "report.html").read_text(encoding="utf-8"))
    addresses = [
        v
        for _, k, v in page.attributes
        if k in ("href", "src", "action", "data", "xlink:href", "poster")
    ]
    assert addresses and all(a.startswith(("#", "data:")) for a in addresses)
    policy = next(
        v for t, k, v in page.attributes if t == "meta" and k == "content" and "default-src" in v
    )
    assert (
        "default-src 'none'" in policy
        and "script-src 'sha256-" in policy
        and "unsafe-inline'; script" not in policy
    )


def test_a_megabyte_is_cut_with_a_note(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "oooo" in html and len(html) < 3_000_000
    assert "the first 900 of 1\u202f000\u202f002 characters" in html


@given(st.text(max_size=400))
@settings(max_examples=examples(300), deadline=None)
def test_visible_text_never_steers(words):
    shown = visible(words)
    assert steering(shown) == []
    shown.encode("utf-8")  # raises for what UTF-8 cannot hold


@given(st.text(max_size=200))
@settings(max_examples=examples(200), deadline=None)
def test_a_markdown_cell_stays_one_cell(words):
    from markdown_it import MarkdownIt

    row = f"| a | b |\n|---|---|\n| {inert(words)} | end |\n"
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(row)
    body = [t for t in tokens if t.type == "inline"]
    assert len(body) == 4 and body[3].content == "end"
    kinds = {child.type for t in body for child in t.children}
    assert kinds <= {"text", "softbreak", "text_special"}, kinds


@given(
    st.text(alphabet="*`#-<>/think \nab1.|", max_size=120),
    st.lists(st.sampled_from(["no_markdown", "thinking_leak", "stop"])),
)
@settings(max_examples=examples(200), deadline=None)
def test_marking_never_changes_the_text(words, failed):
    assert "".join(piece for piece, _ in pages.marked(words, failed)) == words


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = [
    ("aggregates",),
    ("verdict",),
    ("stages",),
    ("environment",),
    ("config",),
    ("aggregates", "models"),
    ("aggregates", "offline"),
    ("aggregates", "offline", "naive", "w4a4"),
    ("aggregates", "offline", "naive", "w4a4", "kl"),
    ("aggregates", "comparisons"),
    ("aggregates", "served", "naive"),
    ("aggregates", "served", "naive", "gates"),
    ("aggregates", "served", "naive", "workloads"),
    ("aggregates", "served", "naive", "gates", "tool_call"),
    ("aggregates", "served", "naive", "workloads", "greeting"),
    ("aggregates", "served", "naive", "gates", "tool_call", "low"),
    ("aggregates", "served", "naive", "memory_bytes"),
    ("aggregates", "turns"),
    ("aggregates", "turns", "naive"),
    ("aggregates", "crossover"),
    ("aggregates", "ladders"),
    ("aggregates", "ladders", "naive"),
    ("aggregates", "ladders", "naive", 0),
    ("verdict", "reasons"),
    ("argv",),
    ("aggregates", "served", "naive", "speed_gates"),
    ("aggregates", "served", "naive", "model"),
    ("aggregates", "offline", "naive", "w4a4", "kl", "by_class"),
]


@given(st.sampled_from(PATHS), JUNK)
@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_field_of_another_type_never_stops_the_report(folder, tmp_path, path, junk):
    document = json.loads((folder / "run.json").read_text())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = junk
    (tmp_path / "run.json").write_text(json.dumps(document))
    report.compose(tmp_path)


def test_a_speed_limit_of_an_unknown_metric_is_refused(folder, tmp_path):
    """It was a KeyError where the verdict names the limit's metric (seed 390078/272 of the boundary run_directory)."""
    document = json.loads((folder / "run.json").read_text())
    limit = document["aggregates"]["served"]["naive"]["speed_gates"]["decode"]
    assert msgspec.convert(limit, SpeedGate, strict=False).verdict == limit["verdict"]
    limit["metric"] = "decode_tok"
    with pytest.raises(msgspec.ValidationError, match="metric"):
        msgspec.convert(limit, SpeedGate, strict=False)
    (tmp_path / "run.json").write_text(json.dumps(document))
    report.compose(tmp_path)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(
                [
                    "backend",
                    "workload",
                    "case",
                    "turn",
                    "text",
                    "tool_calls",
                    "checks",
                    "faults",
                    "itl_ms",
                    "error",
                    "first_content_ms",
                    "concurrency",
                    "warmup",
                    "reasoning",
                    "completion_tokens",
                ]
            ),
            JUNK,
            max_size=8,
        ),
        max_size=4,
    )
)
@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_records_of_another_type_never_stop_the_report(folder, tmp_path, rows):
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    (tmp_path / "records.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows) + '{"torn": '
    )
    html = report.compose(tmp_path)["report.html"]
    assert "could not be read" in html
