"""The public names, parameters, commands and options of tests/data/api.txt exist. Additions are allowed."""

from __future__ import annotations

import inspect
import re

import pytest
from paths import DATA

import annie_quant as aq

LINES = [
    line
    for line in (DATA / "api.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
NAMES = [line for line in LINES if not line.startswith("annie-quant ")]
COMMANDS = [line.split()[1:] for line in LINES if line.startswith("annie-quant ")]


def lacks(line: str) -> list[str]:
    """Return what of one line of api.txt does not exist."""
    name, call, attributes = re.fullmatch(r"([\w.]+)(?:\((.*)\))?(?:: (.*))?", line).groups()
    part, _, attribute = name.partition(".")
    result = getattr(getattr(aq, part), attribute, None)
    if result is None:
        return [name]
    missing = []
    parameters = inspect.signature(result).parameters if call else {}
    for position, one in enumerate(p for p in (call or "").split(", ") if p):
        expected, _, default = one.partition("=")
        actual = parameters.get(expected)
        if actual is None or (default and repr(actual.default) != default):
            missing.append(f"{name}({one})")
        elif not default and list(parameters)[position] != expected:
            missing.append(f"{name}: {expected} is not parameter {position + 1}")
    source = inspect.getsource(result) if attributes else ""
    for expected in (attributes or "").split():
        if not hasattr(result, expected) and not re.search(
            rf"(self\.|^    ){expected}\b", source, re.MULTILINE
        ):
            missing.append(f"{name}.{expected}")
    return missing


@pytest.mark.parametrize("line", NAMES)
def test_a_public_name_keeps_its_place(line: str) -> None:
    if line.startswith("runtime."):
        pytest.importorskip("torch", reason="the quantize extra is not installed")
    assert lacks(line) == []


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_command_keeps_its_options(words: list[str]) -> None:
    from command_line import options_of

    assert {word for word in words[1:] if word.startswith("-")} <= set(options_of(words[0]))


def test_a_removal_is_reported() -> None:
    assert (
        lacks("nvfp4.gone")
        and lacks("nvfp4.pack(w, gone=None)")
        and lacks("nvfp4.pack(w, group=32)")
        and lacks("nvfp4.Tensor: gone")
    )
