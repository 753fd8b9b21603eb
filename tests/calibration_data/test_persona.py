"""Personas: the built-in one, one's own, and the error for each kind of invalid file."""

from __future__ import annotations

import hashlib
import json

import pytest

from annie_quant.core.errors import UsageError
from annie_quant.data import load_persona
from annie_quant.documents.persona import PERSONAS_FOLDER


def test_annie_has_both_tools_and_a_prompt_that_forbids_markdown():
    persona = load_persona("annie")
    assert [t["function"]["name"] for t in persona.tools] == ["search_memory", "web_search"]
    assert "markdown" in persona.system_prompt
    assert persona.tool("web_search")["parameters"]["required"] == ["query"]
    assert persona.tool("read_notes") is None


def test_hash_is_of_the_file_itself():
    assert (
        load_persona("annie").sha256
        == hashlib.sha256((PERSONAS_FOLDER / "annie.json").read_bytes()).hexdigest()
    )


def test_a_changed_file_is_read_again(tmp_path):
    data = json.loads((PERSONAS_FOLDER / "annie.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    before = load_persona(path)
    path.write_text(json.dumps(data | {"system_prompt": "Speak like a pirate, and at length."}))
    after = load_persona(path)
    assert (
        after.system_prompt.startswith("Speak like a pirate")
        and after.prompt_sha256 != before.prompt_sha256
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "Expected `object`, got `array`"),
        ('{"name": "A"}', "missing required field `system_prompt`"),
        (
            '{"name": "A", "system_prompt": 3, "tools": [], "rules": [], "examples": []}',
            "Expected `str`, got `int` - at `$.system_prompt`",
        ),
        (
            '{"name": "A", "system_prompt": "", "tools": [{}], "rules": [], "examples": []}',
            "tools[0] is not an OpenAI function",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_field(tmp_path, text, expected):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_persona(path)
    assert "broken.json" in error.value.message and expected in error.value.message


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError) as error:
        load_persona("bertha")
    assert "annie" in error.value.hint
