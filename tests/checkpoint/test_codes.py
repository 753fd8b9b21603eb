"""`annie-quant explain`: each code in the source has an explanation, and each explanation has a code in the source."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_faults import FAULTS
from command_line import CliRunner
from paths import ROOT

from annie_quant.checkpoint.checks import CODES, DEADLY
from annie_quant.cli import COMMANDS, main
from annie_quant.cli import app as cli
from annie_quant.core.errors import EXIT_CODES, AnnieError

PACKAGE = ROOT / "annie_quant/checkpoint"
CALLS = ("fault", "Finding", "ShardError", "TemplateFault", "_fault", "_limit", "_refused")
KINDS = ("tensor", "input")  # of f"{kind}_scale_bad"
CODE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+")


def codes_in(tree: ast.AST, where: str) -> Iterator[str]:
    """Yield the codes that a module gives to findings and ShardErrors. Raises AssertionError for one that is not constant."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.Module):
            continue
        if isinstance(function, ast.FunctionDef) and function.name in CALLS:
            continue  # passes on its caller's code
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name, first = ast.unparse(call.func), call.args[0]
            if name not in CALLS or isinstance(first, ast.Attribute | ast.Starred):
                continue  # another function; a ShardError's own code; what _refused returns
            if isinstance(first, ast.Constant):
                yield first.value
            elif isinstance(first, ast.JoinedStr):
                text = "".join(
                    v.value if isinstance(v, ast.Constant) else "{}" for v in first.values
                )
                yield from (text.format(kind) for kind in KINDS)
            elif isinstance(function, ast.FunctionDef):  # a variable: the function's constants
                texts = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant)]
                codes = [text for text in texts if isinstance(text, str) and CODE.fullmatch(text)]
                assert codes, f"{where}:{call.lineno}: the code is not a constant"
                yield from codes


def used() -> set[str]:
    files = (
        file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "checks/__init__.py"
    )  # it passes on the codes of others
    return {code for file in files for code in codes_in(ast.parse(file.read_text()), file.name)}


def command(*arguments: str):
    return CliRunner().invoke(cli, ["explain", *arguments])


def test_every_code_is_explained_and_every_explanation_has_a_code():
    assert used() == set(CODES) and len(CODES) > 60
    assert set(CODES) >= DEADLY
    assert {fault[1] for fault in FAULTS.values()} <= set(CODES)


def test_the_search_for_codes_finds_a_new_one():
    """Negative control."""
    source = 'def check(kind):\n    yield fault("new_code", "x", "y")\n    yield fault(f"{kind}_new", "x", "y")\n'
    assert set(codes_in(ast.parse(source), "x.py")) == {"new_code", "tensor_new", "input_new"}
    with pytest.raises(AssertionError, match="not a constant"):
        list(codes_in(ast.parse("def f(code):\n    yield fault(code, '', '')\n"), "x.py"))


def test_the_explanations_are_sentences_with_commands_that_exist():
    for code, explanation in CODES.items():
        assert (
            explanation.meaning.endswith(".")
            and explanation.fix
            and explanation.meaning.isprintable()
        ), code
        for name in re.findall(r"annie-quant ([a-z-]+)", explanation.fix):
            assert name in COMMANDS, code


@pytest.mark.parametrize("page", ["docs/how-to/checkpoints.md"])
def test_the_codes_of_the_documentation_exist(page):
    rows = re.findall(r"^\| [a-z].*\| (`.*) \|$", (ROOT / page).read_text(), re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`([a-z0-9_]+)`", row)}
    assert len(named) > 40 and {n for n in named if not n.endswith("_") and n != "fp8_cast"} <= set(
        CODES
    )


@pytest.mark.parametrize("code", sorted(CODES))
def test_explain_prints_a_code(code):
    outcome = command(code)
    assert (
        outcome.exit_code == 0
        and CODES[code].meaning in outcome.stdout
        and CODES[code].fix in outcome.stdout
    )
    assert ("servers: cannot load" in outcome.stdout) == (code in DEADLY)


def test_explain_lists_all_and_names_similar_codes():
    listed = command().stdout
    assert all(f"{code}: " in listed for code in CODES) and all(
        f"exit code {n}: " in listed for n in EXIT_CODES
    )
    assert set(json.loads(command("--json").stdout)) == {*CODES, *map(str, EXIT_CODES)}
    assert json.loads(command("4", "--json").stdout)["code"] == "4"
    outcome = command("shard_mising")
    assert (
        isinstance(outcome.exception, AnnieError) and "shard_missing" in outcome.exception.message
    )


def test_audit_and_errors_name_the_command(tmp_path: Path, capfd, monkeypatch):
    for arguments, code in (
        (["audit", str(tmp_path / "x")], "no_folder"),
        (["audit", str(tmp_path)], "no_weights"),
    ):
        monkeypatch.setattr("sys.argv", ["annie-quant", *arguments])
        with pytest.raises(SystemExit):
            main()
        printed = capfd.readouterr()
        assert f"annie-quant explain {code}" in printed.out + printed.err


def test_the_page_on_checkpoints_lists_every_code_of_an_audit():
    page = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([a-z0-9_]+)`", page))
    listed |= {
        code.replace("tensor_scale_", "input_scale_")
        for code in listed
        if code.startswith("tensor_scale_")
    }
    not_of_an_audit = {
        "no_folder",
        "no_weights",
        "tokenizer_missing",
        "tokenizer_unknown",
    }
    assert set(CODES) - listed == not_of_an_audit
