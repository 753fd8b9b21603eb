"""Tables of the terminal: 80 columns, the reference first, the same names as the report's."""

from __future__ import annotations

import io

import pytest

from annie_quant import judge
from annie_quant.cli import tables
from annie_quant.cli.terminal import TerminalConsole
from annie_quant.documents import OfflineSide, PairedGate, PrefillLine
from annie_quant.judge import decision
from annie_quant.judge.gates import GATES, tabulate

MEMBERS = (
    "w4a4",
    "w4a16",
    "float32",
    "vllm-cutlass",
    "llama.cpp-blackwell",
    "vllm-cutlass+perm1",
    "vllm-cutlass+perm2",
)


def table(n=240, **passes):
    return tabulate({gate: i < passes.get(gate, n) for gate in GATES} for i in range(n))


def columns(members=MEMBERS, n=240, lost=58):
    sides = {}
    for i, name in enumerate(members):
        gone = lost if i == 0 else 0
        pairs = {
            gate: PairedGate(n, gone if gate in ("tool_call", "tool_call_raw") else 0, 0)
            for gate in GATES
        }
        sides[name] = OfflineSide(
            gates=table(n, tool_call=n - gone, tool_call_raw=n - gone), paired=pairs
        )
    sides, verdict = decision.judge_sides(sides)
    return verdict, [tables.Column(name, side.gates, side.paired) for name, side in sides.items()]


@pytest.mark.parametrize("n", [5, 240, 1680])
@pytest.mark.parametrize("members", [MEMBERS[:1], MEMBERS[:2], MEMBERS])
def test_tables_fit_eighty_columns_and_nothing_is_cut(n, members):
    verdict, cols = columns(members, n, lost=n // 4)
    lines = [
        *tables.gate_lines(table(n), cols),
        *tables.verdict_lines(verdict),
        *tables.reason_lines(verdict),
        *tables.side_lines(cols),
    ]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text and all(name in text for name in members)
    assert all(gate.title in text for gate in GATES.values()), "the report's names, not the keys"


def test_the_reference_is_the_first_column_of_every_block():
    _, cols = columns()
    heads = [line.split() for line in tables.gate_lines(table(), cols) if line.startswith("gate ")]
    assert len(heads) > 3 and all("bf16" in head[2:4] for head in heads)
    assert [head[:4] for head in heads if "finds" in head].count(["gate", "n", "finds", "bf16"]) > 3


def test_changes_against_bf16_have_a_table_of_their_own():
    """A change is not an error: gates with a right and wrong come first."""
    rows = [{"same_tool": True, "call_rate": True, "abstention": True, "stop": True}] * 60
    pairs = {gate: PairedGate(60, 0, 0) for gate in rows[0]}
    side = OfflineSide(gates=tabulate(rows), paired=pairs)
    side = decision.judge_sides({"w4a4": side})[0]["w4a4"]
    lines = tables.gate_lines(tabulate(rows), [tables.Column("w4a4", side.gates, side.paired)])
    at = lines.index("Changed (compared with bf16's own answers; a change is not an error):")
    assert lines[0] == "Right or wrong (by labels and rules):"
    right = "\n".join(lines[:at])
    changed = "\n".join(lines[at:])
    assert "no tool where none fits" in right and "stops by itself" in right
    assert "tool or none as bf16" in changed and "call rate" in changed
    assert "as bf16" not in right and "stops by itself" not in changed


def test_what_bf16_itself_misses_is_shown_next_to_the_checkpoint():
    """eval listed "factual 0/5 fail" without bf16's 1/5."""
    pairs = {"factual": PairedGate(5, 1, 0)}
    side = OfflineSide(gates=tabulate([{"factual": False}] * 5), paired=pairs)
    side = decision.judge_sides({"w4a4": side})[0]["w4a4"]
    reference = tabulate([{"factual": i == 0} for i in range(5)])
    lines = tables.gate_lines(reference, [tables.Column("w4a4", side.gates, side.paired)])
    row = next(line.split() for line in lines if line.startswith("factual"))
    assert row[:2] == ["factual", "5"] and row[-4:] == ["1", "0", "-20.0", "undecided"]
    assert any(
        "bf16 misses R25" in line
        for line in tables.requirement_lines({"bf16": reference, "w4a4": side.gates})
    )


def test_gates_that_inform_have_no_verdict():
    _, cols = columns(MEMBERS[:1])
    lines = tables.gate_lines(table(), cols)
    at = lines.index("For information, without a verdict:")
    assert not any(
        word in line
        for line in lines[at + 1 :]
        for word in ("loses", "keeps", "fail", "misses", "undecided")
    )
    raw = next(line for line in lines[at:] if line.startswith("tool calls, raw text"))
    assert "182 -24.2" in raw


def test_the_detectable_loss_stands_next_to_n():
    _, cols = columns(MEMBERS[:1])
    row = next(
        line.split() for line in tables.gate_lines(table(), cols) if line.startswith("factual ")
    )
    assert row[1] == "240" and 0.5 < float(row[2]) < 5


def test_one_row_per_side_names_what_is_not_kept():
    _, cols = columns(MEMBERS[:2])
    lines = tables.side_lines(cols, tables.Column("bf16", table(factual=100)))
    assert lines[1].split()[:2] == ["bf16", "reference"] and "misses R25 (100 of 240)" in lines[1]
    assert "w4a4" in lines[2] and "loses" in lines[2] and "tool calls -24.2 loses" in lines[2]
    assert "keeps" in lines[3]


def test_a_pipe_gets_plain_text(capsys, monkeypatch):
    verdict, _ = columns(MEMBERS[:2])
    console = TerminalConsole()
    assert console.width == 80
    console.print_lines(tables.verdict_lines(verdict))
    text = capsys.readouterr().out
    assert "\x1b" not in text and "Loses under W4A4: does not call the right" in text


def test_a_terminal_gets_colours():
    from rich.console import Console as Rich

    console, stream = TerminalConsole(), io.StringIO()
    console.out = Rich(file=stream, force_terminal=True, width=100, highlight=False)
    console.print_lines(["tool calls loses"])
    assert "\x1b[31m" in stream.getvalue() and console.width == 100


def test_a_tree_is_wrapped_under_its_text():
    line = "    │   ├── gates at n = 100 → " + "; ".join(
        ["W4A4: tool calls lost 60 and won 0 of 100"] * 4
    )
    lines = tables.wrap_tree(line)
    assert len(lines) > 1 and max(map(len, lines)) <= 80 and lines[1].startswith(" " * 12)
    assert " ".join(part.strip() for part in lines) == line.strip()


def test_judge_exports_the_rule():
    assert judge.judge_members({}).verdict == "undecided"


def test_the_line_of_the_first_token_names_side_cache_slope_and_interval():
    cold = PrefillLine(
        cache="cold",
        n=39,
        n_prompts=15,
        fewest_tokens=168,
        most_tokens=7968,
        ms_per_1000=9.32,
        low=7.31,
        high=12.82,
        start_ms=18.7,
    )
    few = PrefillLine(
        cache="cached", n=3, n_prompts=1, fewest_tokens=9, most_tokens=9, ms_per_1000=None
    )
    (line,) = tables.prefill_lines({"w4a16": [cold, few]}, width=200)
    assert line == (
        "w4a16, cold: first token after 19 ms and 9.3 ms per 1,000 computed tokens (7.3 to 12.8), "
        "168 to 7,968 tokens"
    )
