# ruff: noqa: E501
"""No escape sequence of a file or a server reaches a terminal."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Rich

from annie_quant.cli import process, tables
from annie_quant.cli.terminal import TerminalConsole, emit
from annie_quant.core.errors import AnnieError
from annie_quant.core.text import printable
from annie_quant.documents import PairedGate, PairedVerdict
from annie_quant.judge.gates import tabulate

HOSTILE = [
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\x", "\x9b31m", "\x1bP1$r\x1b\\", "a\rb", "\x08\x08", "\u202egnp", "\u2066",
    "\x1b", "\x9d0;t\x9c", "[/]", "[link=http://evil]x[/link]", "[red]", "\ud800", "\x00", "\u2028", "\ufeff",
]  # fmt: skip


def steers(text: str) -> list[str]:
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and c not in "\n\t"
    ]


@given(st.text() | st.text(alphabet="\x1b[]0;mP\\\x07\x9b\x9d?!-~\u202e\n\t a"))
def test_printable_leaves_nothing_that_steers(text):
    assert steers(printable(text)) == [] and "\n" not in printable(text)
    assert steers(printable(text, lines=True)) == []
    assert len(printable(text, 10)) <= 10


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S"])))
def test_ordinary_text_is_unchanged(text):
    assert printable(text) == text


@pytest.fixture
def screen(monkeypatch):
    """A console on a terminal of 200 columns."""
    out = io.StringIO()
    terminal = TerminalConsole()
    terminal.err = terminal.out = Rich(
        file=out, force_terminal=True, width=200, color_system=None, highlight=False
    )
    terminal.text = out.getvalue
    return terminal


@pytest.mark.parametrize("hostile", HOSTILE)
def test_all_that_the_console_prints(screen, hostile):
    screen.note(hostile)
    screen.line(hostile, mark="[red]x[/]")
    screen.error(hostile, hostile)
    screen.print_mapping(hostile, {hostile: [hostile], "b": hostile})
    row = PairedGate(1, 0, 0)
    verdict = PairedVerdict(sentence=hostile, head=[hostile], reasons=[hostile])
    screen.print_lines([*tables.verdict_lines(verdict), *tables.reason_lines(verdict)])
    screen.print_lines(
        tables.gate_lines(
            None, [tables.Column(hostile, tabulate([{"factual": True}]), {"factual": row})]
        )
    )
    screen.print_report(hostile)
    assert steers(screen.text()) == []


def test_messages_of_errors_are_one_printable_line():
    error = AnnieError("a\x1b[31m\nb" + "x" * 5000, "do\x1b]0;t\x07 it")
    assert (
        error.message.isprintable() and len(error.message) <= 2000 and str(error) == error.message
    )
    assert error.hint == "do it"


def test_json_is_escaped_and_stays_the_same(capsys):
    emit({"a": "".join(HOSTILE[:-5]) + "ü"})
    text = capsys.readouterr().out
    assert steers(text) == [] and json.loads(text) == {"a": "".join(HOSTILE[:-5]) + "ü"}


def test_log_records_and_warnings_of_libraries(capsys, monkeypatch):
    factory, form = logging.getLogRecordFactory(), warnings.formatwarning
    try:
        process.clean_library_messages()
        logger = logging.Logger("x")
        logger.addHandler(logging.StreamHandler())
        logger.warning("a %s", "\x1b[31m\u202e")
        text = warnings.formatwarning("b \x1b[31m", UserWarning, "file", 1)
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = form
    assert steers(capsys.readouterr().err) == []
    assert text == "UserWarning: b\n" or steers(text) == []
