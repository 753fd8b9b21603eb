"""Offline answers are read in the form of the checkpoint's chat template, as a server with that template's parsers reads them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from paths import TINY_ANNIE

pytest.importorskip(
    "transformers", reason="the tokenizer is transformers': pip install annie-quant[quantize]"
)

from annie_quant.core.errors import UsageError
from annie_quant.judge import load_workloads
from annie_quant.offline.decoding import Completion
from annie_quant.offline.prompts import Template
from annie_quant.quantize.calibration_text import samples_of_rows

CALL = {"name": "web_search", "arguments": {"query": "rain"}}
HERMES = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
XML = "<tool_call>\n<function=web_search>\n<parameter=query>\nrain\n</parameter>\n</function>\n</tool_call>"
LLAMA = json.dumps({"name": "web_search", "parameters": {"query": "rain"}})
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"


def test_without_a_generation_config_the_model_names_its_end_token(tmp_path: Path) -> None:
    """A GGUF file's tokenizer may name another token than the chat template's; answers would not end."""
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        shutil.copyfile(TINY_ANNIE / name, tmp_path / name)
    tokenizer = json.loads((TINY_ANNIE / "tokenizer_config.json").read_text()) | {
        "eos_token": "<|endoftext|>"
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    names = Template(tmp_path).tokenizer.convert_ids_to_tokens(Template(tmp_path).end_tokens)
    assert names == ["<|endoftext|>", "<|im_end|>"]
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    }
    assert len(samples_of_rows(tmp_path, [row], 100)) == 1
    (tmp_path / "config.json").unlink()
    missing = r"ends an answer with '<\|im_end\|>', and the end tokens are '<\|endoftext\|>': eos_token_id"
    with pytest.raises(UsageError, match=missing):
        samples_of_rows(tmp_path, [row], 100)


@pytest.mark.parametrize(
    ("template", "own", "others", "thinks"),
    [
        pytest.param(None, XML, [HERMES, LLAMA], True, id="qwen_xml"),
        pytest.param(
            TURNS + '<tool_call>{"arguments": {}}</tool_call><think></think>',
            HERMES,
            [XML, LLAMA],
            True,
            id="hermes",
        ),
        pytest.param(TURNS + "<|start_header_id|>", LLAMA, [XML, HERMES], False, id="llama_json"),
    ],
)
def test_a_call_in_the_templates_form_is_a_call(
    tmp_path: Path, template: str | None, own: str, others: list[str], thinks: bool
) -> None:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        shutil.copyfile(TINY_ANNIE / name, tmp_path / name)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    reader = Template(tmp_path)
    (workload,) = load_workloads("tool_web")
    for thinking in (False, True):
        used = replace(workload, thinking=thinking)
        request = reader.request(used, used.cases[0])
        thoughts = "<think>\nHm.\n</think>\n\n" if thinking and thinks else ""
        for text in (own, *others):
            answer = reader.answer(request, Completion(reader.ids(thoughts + text), True))
            calls = [(c["name"], json.loads(c["arguments"])) for c in answer.tool_calls]
            assert calls == ([(CALL["name"], CALL["arguments"])] if text == own else [])
            assert answer.finish_reason == ("tool_calls" if text == own else "stop")
            assert answer.reasoning == ("Hm." if thoughts else "") and bool(answer.text) == (
                text != own
            )
