"""Terminal output: heartbeats on a pipe, and the figures of printed mappings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
import time

import pytest
from paths import ROOT

from annie_quant.cli import terminal
from annie_quant.cli.terminal import TerminalConsole, value_text
from annie_quant.core.progress import ByteProgress, Lines


def test_a_pipe_gets_a_line_while_a_task_runs(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "HEARTBEAT_S", 0.05)
    console = TerminalConsole()
    with console.task("measure") as step:
        step.update(3, 10, "alpha · factual")
        time.sleep(0.3)
        step.message("writing")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    beats = [line for line in lines if line.startswith("… ")]
    assert (
        len(beats) >= 2
        and beats[0] == "… measure, 0 s: 3 of 10, alpha · factual"
        and "writing" in beats[-1]
    )
    assert lines[-1].startswith("✓ measure")
    assert not any(t.name.endswith("heartbeat") for t in threading.enumerate())


def test_a_pipe_learns_when_a_task_ends(monkeypatch, capsys):
    """A benchmark in a log had the number of visits, and no time."""
    now = 1000.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    step = terminal.TerminalTask("bench")
    step.update(40, 100, "a · factual")  # 40 were finished by an earlier run
    assert step.remaining_s is None
    now += 60
    step.update(50, 100, "b · factual")
    assert step.remaining_s == pytest.approx(300)
    step.update(100, 100)
    assert step.remaining_s == 0
    assert terminal.heartbeat_line("bench", 61.0, step) == "… bench, 61 s: 100 of 100"
    step.update(60, 100, "a · greeting")
    assert terminal.heartbeat_line("bench", 62.0, step).endswith("a · greeting, about 2 min left")


def test_progress_states_when_a_step_ends(monkeypatch):
    """Off a terminal the text is all that a reader sees. Each step has its own rate."""
    clock = iter([0.0, 10.0, 20.0, 100.0, 103.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    lines = []
    shown = Lines(lines.append)
    for done, text in ((0, "a"), (1, "a"), (2, "a"), (0, "b"), (1, "b")):
        shown.update(done, 4, text)
    assert lines == ["a", "a, 30 s left", "a, 20 s left", "b", "b, 9 s left"]


def test_a_log_has_the_time_that_is_left_once(monkeypatch):
    """A checkpoint of one file after the other: "…, 3 s left, about 3 s left". A new total is another step."""
    now = 1000.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    step = terminal.TerminalTask("convert")
    step.update(0, 4, "reading")
    now += 100
    done = ByteProgress(step, 1_000_000_000, done_before=200_000_000)
    now += 2
    done.add(400_000_000)
    line = terminal.heartbeat_line("convert", 102.0, step)
    assert line.count("left") == 1 and line.endswith("600 of 1,000 MB, 200 MB/s, about 2 s left")


def test_a_short_task_writes_no_heartbeat(capsys):
    with TerminalConsole().task("short"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"✓ short \d\.\d s", line)


def test_the_thread_ends_with_an_error_of_the_task():
    with pytest.raises(RuntimeError), TerminalConsole().task("fails"):
        raise RuntimeError
    assert not any(t.name.endswith("heartbeat") for t in threading.enumerate())


def test_a_closed_pipe_does_not_end_the_task():
    code = (
        "import importlib, os, sys, time\n"
        "module = importlib.import_module('annie_quant.cli.terminal')\n"
        "module.HEARTBEAT_S = 0.02\n"
        "r, w = os.pipe(); os.close(r); os.dup2(w, 2)\n"
        "with module.TerminalConsole().task('x'):\n"
        "    time.sleep(0.5)\n"
        "    os.dup2(os.open('/dev/null', os.O_WRONLY), 2)\n"
        "print('finished')\n"
        "sys.stdout.flush(); os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "finished\n" and done.returncode == 0


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("kl", 0.067312359864528, "0.06731"),
        ("size_bytes", 5204008, "5.204 MB (5,204,008 bytes)"),
        ("size_bytes", 12, "12"),
        ("weights", 7500720, "7500720"),
        ("ok", True, "True"),
        ("shares", [0.123456789, 2], "0.1235, 2"),
        ("by_category", {"greeting": 2, "share": 0.123456789}, "greeting 2, share 0.1235"),
        ("faults", {}, "none"),
        ("failed", [], "none"),
    ],
)
def test_values_are_short(key, value, text):
    assert value_text(key, value) == text


def test_a_value_that_is_unknown_has_no_row(capsys):
    TerminalConsole().print_mapping("x", {"size_bytes": None, "rel_l2": 0.08562429379285291})
    out = capsys.readouterr().out
    assert "0.08562 " in out and "None" not in out and "size_bytes" not in out


def test_every_message_has_decimal_units():
    """MB and GB only: in one report MiB next to MB make sizes look different. host.py reads nvidia-smi's MiB."""
    binary = []
    for path in sorted((ROOT / "annie_quant").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = (
                node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            )
            if re.search(r"\b[MG]iB\b", text) and path.name not in ("host.py", "direct.py"):
                binary.append(f"{path.name}:{node.lineno}: {text[:60]}")
    assert not binary
