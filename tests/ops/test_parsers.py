"""The parsers of a dry run are those of the checkpoint's chat template, and a model that does not think has none for thinking."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from paths import TINY_ANNIE

import annie_quant as aq
from annie_quant.core.files import ASSETS
from annie_quant.models.server_parsers import notes_for, parser_rows, row_of
from annie_quant.ops.serving import RECIPE_RUNTIMES, load_recipes

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
JSON_CALL = (
    TOOLS + '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
XML_CALL = TOOLS + "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>"
GRANITE = "<|start_of_role|>" + TOOLS
# What each template is recognised by, and the flags that vLLM's and SGLang's documentation states for the family:
# tool and reasoning parser of vLLM, then of SGLang.
FAMILIES = {
    "Qwen3.5": (XML_CALL + "<think>", "qwen3_coder", "qwen3", "qwen3_coder", "qwen3"),
    "Qwen3-Coder": (XML_CALL, "qwen3_coder", None, "qwen3_coder", None),
    "Qwen3": (JSON_CALL + "<think>", "hermes", "qwen3", "qwen25", "qwen3"),
    "Qwen3-Instruct-2507": (JSON_CALL, "hermes", None, "qwen25", None),
    "Gemma 3": ("<start_of_turn>{{ messages }}", None, None, None, None),
    "Gemma 4": (TOOLS + "<|tool_call>call:<|channel>", "gemma4", "gemma4", "gemma4", "gemma4"),
    "Llama 3": (TOOLS + "<|start_header_id|>", "llama3_json", None, "llama3", None),
    "Llama 3 without tools": ("<|start_header_id|>{{ messages }}", None, None, None, None),
    "Llama 4": (TOOLS + "<|header_start|>", "llama4_pythonic", None, "pythonic", None),
    "Granite 3": (GRANITE, "granite", None, None, None),
    "Granite 4.0": (GRANITE + JSON_CALL, "granite4", None, "hermes", None),
    "Granite 4.2": (
        GRANITE + XML_CALL + "<think>",
        "qwen3_coder",
        "granite_thinking_parser",
        "qwen3_coder",
        "granite_thinking_parser",
    ),
    "Mistral": (TOOLS + "[TOOL_CALLS]", "mistral", None, "mistral", None),
    "Magistral": (TOOLS + "[TOOL_CALLS][THINK]", "mistral", "mistral", "mistral", "mistral"),
    "Nemotron 3": (
        XML_CALL + "<think>{{ truncate_history_thinking }}",
        "qwen3_coder",
        "nemotron_v3",
        "qwen3_coder",
        "nemotron_3",
    ),
    "DeepSeek-R1": ("{{ '<｜Assistant｜><think>' }}", None, "deepseek_r1", None, "deepseek-r1"),
    "gpt-oss": (TOOLS + "<|start|><|channel|>", "openai", "openai_gptoss", "gpt-oss", "gpt-oss"),
    "GLM-4.5": (TOOLS + "<tool_call>{name}<arg_key><think>", "glm45", "glm45", "glm45", "glm45"),
    "LFM2": (TOOLS + "<|tool_call_start|>", "lfm2", None, "lfm2", None),
    "an unknown form": (TOOLS + "<minimax:tool_call>", None, None, None, None),
    "tiny-annie": (
        (TINY_ANNIE / "chat_template.jinja").read_text(),
        "qwen3_coder",
        "qwen3",
        "qwen3_coder",
        "qwen3",
    ),
    "no template": (None, "qwen3_coder", "qwen3", "qwen3_coder", "qwen3"),
}


def value(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_the_parsers_are_the_templates(tmp_path: Path, family: str, place: str) -> None:
    template, *expected = FAMILIES[family]
    if template is not None and place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif template is not None:
        stored = template if place == "config" else [{"name": "default", "template": template}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    found = []
    for runtime in ("vllm", "sglang"):
        command = shlex.split(aq.serve.command(tmp_path, runtime=runtime))
        tool = value(command, "--tool-call-parser")
        found += [tool, value(command, "--reasoning-parser")]
        wants_option = runtime == "vllm" and tool is not None
        assert ("--enable-auto-tool-choice" in command) == wants_option
        assert ("--tokenizer-mode" in command) == (wants_option and tool == "mistral")
        assert "" not in command and (value(command, "--port") or "8000") == "8000"
    assert found == expected


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [1, {"template": null}]}']
)
def test_a_faulty_tokenizer_config_gets_the_parsers_of_qwen3_5(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    for runtime in RECIPE_RUNTIMES:
        for name in load_recipes(runtime.name):
            command = shlex.split(aq.serve.command(tmp_path, runtime=runtime.name, recipe=name))
            assert value(command, "--tool-call-parser") == "qwen3_coder"


def test_every_row_is_used_and_has_its_source_with_a_date() -> None:
    reached = {row.family for t, *_ in FAMILIES.values() if t and (row := row_of(t)) is not None}
    qwen2_5 = row_of(JSON_CALL + "You are Qwen, created by Alibaba Cloud")
    assert qwen2_5 is not None
    assert {row.family for row in parser_rows()} == reached | {qwen2_5.family}
    for row in parser_rows():
        assert re.fullmatch(r"2026-\d\d-\d\d", row.date) and row.source, row
        assert set(row.servers) == {"vllm", "sglang"}, row


def test_no_text_for_users_names_the_parsers_of_one_family() -> None:
    """Hints that always named qwen3 emptied the answers of models that do not think."""
    for path in ASSETS.glob("*.json"):
        if path.name not in ("server_parsers.json", "known_bad_versions.json"):
            assert "qwen3_coder" not in path.read_text(), path.name
            assert "--reasoning-parser qwen3" not in path.read_text(), path.name


def test_an_unknown_form_and_a_known_limit_are_named() -> None:
    assert "not known here" in notes_for("vllm", FAMILIES["an unknown form"][0])[0]
    assert "no parser for Granite 3" in notes_for("sglang", FAMILIES["Granite 3"][0])[0]
    assert notes_for("vllm", FAMILIES["Qwen3.5"][0]) == []
