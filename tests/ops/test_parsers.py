"""The dry run's parsers are those of the checkpoint's chat template, not always Qwen3.5's."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from paths import TINY_ANNIE

import annie_quant as aq
from annie_quant.ops.serving import RECIPE_RUNTIMES, fitted, load_recipes

QWEN3 = '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}<think>'
LLAMA = '{% if tools %}<|python_tag|>{"name": function name, "parameters": {}}{% endif %}<|start_header_id|>'
PLAIN = "{% for m in messages %}<|start_header_id|>{{ m.content }}{% endfor %}"


def words(folder: Path, runtime: str) -> list[str]:
    return shlex.split(aq.serve.command(folder, runtime=runtime))


def value(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


@pytest.mark.parametrize(
    ("template", "tools", "thinking"),
    [
        (QWEN3, {"vllm": "hermes", "sglang": "qwen25"}, "qwen3"),
        (LLAMA, {"vllm": "llama3_json", "sglang": "llama3"}, None),
        (PLAIN, {"vllm": None, "sglang": None}, None),
        (
            (TINY_ANNIE / "chat_template.jinja").read_text(),
            {"vllm": "qwen3_coder", "sglang": "qwen3_coder"},
            "qwen3",
        ),
        (None, {"vllm": "qwen3_coder", "sglang": "qwen3_coder"}, "qwen3"),
    ],
)
@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_the_parsers_are_the_templates(
    tmp_path: Path,
    template: str | None,
    tools: dict,
    thinking: str | None,
    runtime: str,
    place: str,
) -> None:
    if template is not None and place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    elif template is not None:
        stored = template if place == "config" else [{"name": "default", "template": template}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    command = words(tmp_path, runtime)
    assert value(command, "--tool-call-parser") == tools[runtime]
    assert value(command, "--reasoning-parser") == thinking
    if runtime == "vllm":
        assert ("--enable-auto-tool-choice" in command) == (tools[runtime] is not None)
    assert "" not in command and (value(command, "--port") or "8000") == "8000"


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [1, {"template": null}]}']
)
def test_a_faulty_tokenizer_config_keeps_the_recipes_parsers(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    for runtime in RECIPE_RUNTIMES:
        for recipe in load_recipes(runtime.name).values():
            assert fitted(recipe.command, tmp_path, runtime.parsers) == recipe.command
