"""Grammar-based fuzzing of every boundary, with few cases; `make fuzz-boundaries CASES=100000` runs many.

ANNIE_QUANT_FUZZ_CASES scales the counts. 1,000 cases in all, as `make test-thorough` has them, take less than a minute of one core.
"""

from __future__ import annotations

import os

import pytest
from fuzz.boundaries.grammar import RAW, Hostile, Raw, encode
from fuzz.boundaries.harness import KEY, NAMES, Finding, Sandbox, check_text, fuzz

TOTAL = int(os.environ.get("ANNIE_QUANT_FUZZ_CASES", "500"))
# In thousandths: by the cost of a case (a template may need its whole time limit, a report its figures).
SHARES = {"server_answers": 200, "server_identity": 200, "checkpoint": 140, "adapters": 60, "templates": 20, "run_directory": 60,
          "logs": 100, "workloads": 90, "personas": 70, "traces": 60}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hostile_input_is_a_clean_error(name):
    if name == "templates":
        pytest.importorskip("transformers", reason="the quantize extra is not installed")
    if name == "checkpoint":
        pytest.importorskip("gguf", reason="the serve extra is not installed")
    assert fuzz(name, max(1, TOTAL * SHARES[name] // 1000), seed=18) == []


def test_every_boundary_has_a_share():
    assert set(SHARES) == set(NAMES) and sum(SHARES.values()) == 1000


def test_the_grammar_is_repeatable_and_hostile():
    document = {"a": [1, 2, {"b": "c"}], "d": "e"}
    first = [encode(Hostile(i).changed(document)) for i in range(200)]
    assert first == [encode(Hostile(i).changed(document)) for i in range(200)]
    assert len(set(first)) > 150
    assert encode([Raw(RAW[0]), {"x": None}]) == b'[NaN,{"x":null}]'


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("raise ValueError('x')", "x"),
        ("raise SystemExit(77)", "exit code 77"),
        ("print('\\x1b[31mred')", "reaches the terminal"),
        ("print(KEY)", "the key is shown"),
        ("print('Traceback (most recent call last)')", "a traceback was printed"),
        ("(sandbox.home / 'x').write_text('x')", "files outside the output changed"),
        ("(sandbox.output / 'x').write_text(KEY)", "the key is in x"),
    ],
)
def test_the_harness_reports_each_broken_promise(tmp_path, monkeypatch, behaviour, message):
    from annie_quant import cli

    sandbox = Sandbox(tmp_path)
    code = compile(behaviour, "behaviour", "exec")
    monkeypatch.setattr(cli, "main", lambda: exec(code, {"sandbox": sandbox, "KEY": KEY}))
    with pytest.raises((Finding, ValueError), match=message):
        sandbox.run("x")


def test_clean_text_passes():
    check_text("one\ntwo\tthree ü 😀")
