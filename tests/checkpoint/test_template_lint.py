"""The lint of a chat template names each planted fault with its line, and has no alarm on sound templates."""

# ruff: noqa: E501 - lines of templates
from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import checkpoint_zoo as zoo
import pytest
from command_line import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT, TINY_ANNIE

import annie_quant as aq
from annie_quant.checkpoint import chat_template
from annie_quant.checkpoint.chat_template import ChatTemplate
from annie_quant.checkpoint.prompt_files import FolderTokenizer
from annie_quant.checkpoint.template_conversations import conversations
from annie_quant.checkpoint.template_lint import lint_folder
from annie_quant.cli import app as cli
from annie_quant.documents import TemplateLint

SHIPPED = sorted((ROOT / "annie_quant/assets").glob("*/chat_template.jinja"))

# A template in which every conversation of the lint is right; {CALL} and {SHOWN} are of the form.
SOUND = """\
{%- macro plain(content) -%}
{%- set parts = [content] if content is string else (content or []) | map(attribute='text') | list -%}
{{- parts | join('') | replace('<|im_end|>', '') -}}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n' + (tools | tojson) + '\\nCall a tool so:\\n' }}
{{- {SHOWN} }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>tool\\n' + plain(message.content) + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- plain(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{CALL}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
JSON_SHOWN = """'<tool_call>\\n{"name": NAME, "arguments": {"KEY": VALUE}}\\n</tool_call>'"""
JSON_CALL = """\
{%- set written = arguments if arguments is string else arguments | tojson %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + written + '}\\n</tool_call>' }}"""
XML_SHOWN = "'<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>'"
XML_CALL = """\
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- if arguments is string %}
{{- '<parameter=city>\\nOslo\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>\\n' }}
{%- else %}
{%- for key, value in arguments.items() %}
{{- '<parameter=' + key + '>\\n' }}
{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{%- endif %}
{{- '</function>\\n</tool_call>' }}"""
SOUND_JSON = SOUND.replace("{SHOWN}", JSON_SHOWN).replace("{CALL}", JSON_CALL)
SOUND_XML = SOUND.replace("{SHOWN}", XML_SHOWN).replace("{CALL}", XML_CALL)
MISTRAL_CALL = """{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (arguments if arguments is string else arguments | tojson) }}"""
SOUND_MISTRAL = SOUND.replace("{SHOWN}", "''").replace("{CALL}", MISTRAL_CALL)
GEMMA_CALL = """\
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for key, value in (arguments if arguments is mapping else {'city': 'Oslo', 'days': 3}).items() %}
{{- (',' if not loop.first else '') + key + ':' }}
{{- value | tojson | replace('\\\\"', '\\x00') | replace('"', '<|"|>') | replace('\\x00', '"') | replace('\\\\n', '\\n') | replace('\\\\\\\\', '\\\\') }}
{%- endfor %}
{{- '}<tool_call|>' }}"""
SOUND_GEMMA = SOUND.replace("{SHOWN}", "''").replace("{CALL}", GEMMA_CALL)
CONTENT = "{{- plain(message.content) }}"
TOOL = "{{- '<|im_start|>tool\\n' + plain(message.content) + '<|im_end|>\\n' }}"
ROLE = "{{- '<|im_start|>' + message.role + '\\n' }}"
TOOLS = "{{- '<|im_start|>system\\n' + (tools | tojson) + '\\nCall a tool so:\\n' }}"
SECOND = "{%- for call in message.tool_calls or [] %}"


def refusing(condition: str, line: str) -> str:
    return "{%- if " + condition + " %}{{ raise_exception('no') }}{% endif %}" + line


# The 17 faults of the list that this lint follows: the template, the line that is replaced, its faulty form, the code.
PLANTED = {
    "1 arguments as text are refused": (SOUND_XML, "{%- for key, value in arguments.items() %}", "", "template_arguments_text"),
    "2 arguments as text are encoded twice": (
        SOUND_JSON,
        "{%- set written = arguments if arguments is string else arguments | tojson %}",
        "{%- set written = arguments | tojson %}",
        "template_arguments_text",
    ),
    "3 null as None": (
        SOUND_XML,
        "{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}",
        "{{- (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) + '\\n</parameter>\\n' }}",
        "template_value_changed",
    ),
    "5 several calls are refused": (SOUND_JSON, SECOND, refusing("(message.tool_calls or []) | length > 1", SECOND), "template_several_calls"),
    "5 several calls are lost": (SOUND_JSON, SECOND, SECOND.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"), "template_several_calls"),
    "5 the text is lost": (SOUND_JSON, CONTENT, "{%- if not message.tool_calls %}" + CONTENT + "{%- endif %}", "template_call_text"),
    "6 null content is refused": (SOUND_JSON, CONTENT, "{{- '' + message.content | replace('x', 'x') if message.content is string else message.content + '' }}", "template_null_content"),
    "7 results in parts are lost": (SOUND_JSON, TOOL, TOOL.replace("plain(message.content)", "plain(message.content if message.content is string else '')"), "template_result_parts"),
    "8 no tool role": (SOUND_JSON, TOOL, "{{- raise_exception('no tool role') }}", "template_tool_role"),
    "8 two user turns are refused": (
        SOUND_JSON,
        ROLE,
        refusing("message.role == 'user' and loop.previtem and loop.previtem.role == 'user'", ROLE),
        "template_two_users",
    ),
    "9 a later system message is refused": (SOUND_JSON, ROLE, refusing("message.role == 'system' and not loop.first", ROLE), "template_later_system"),
    "10 the developer role is refused": (SOUND_JSON, ROLE, refusing("message.role == 'developer'", ROLE), "template_developer"),
    "11 no user message is refused": (SOUND_JSON, TOOLS, refusing("not messages | selectattr('role', 'equalto', 'user') | list", TOOLS), "template_no_user"),
    "12 thinking is left out later": (
        SOUND_JSON,
        "{%- if message.role == 'assistant' and message.reasoning_content %}",
        "{%- if message.role == 'assistant' and message.reasoning_content and messages[-1].role != 'user' %}",
        "template_prefix_changes",
    ),
    "13 thinking is off": (
        SOUND_JSON,
        "{%- if enable_thinking is defined and not enable_thinking %}",
        "{%- if enable_thinking is not defined or not enable_thinking %}",
        "template_thinking_default",
    ),
    "14 ids have nine characters": (
        SOUND_MISTRAL,
        SECOND,
        SECOND + "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}",
        "template_call_id",
    ),
    "15 control tokens in a result": (SOUND_JSON, TOOL, TOOL.replace("plain(message.content)", "(message.content if message.content is string else plain(message.content))"), "template_control_tokens"),
    "16 another order": (SOUND_GEMMA, ".items() %}", "| dictsort %}", "template_argument_order"),
    "16 numbers as text": (SOUND_GEMMA, "{{- value | tojson |", "{{- (value | string if value is number and value is not boolean else value) | tojson |", "template_value_changed"),
    "17 the tools are absent": (SOUND_JSON, TOOLS, TOOLS.replace("(tools | tojson)", "'tools'"), "template_tools_ignored"),
    "17 another form is shown": (
        SOUND_XML,
        "{{- " + XML_SHOWN + " }}",
        "{{- " + JSON_SHOWN + " }}",
        "template_form_differs",
    ),
    "a result is lost": (SOUND_JSON, TOOL, "{{- '<|im_start|>tool\\n<|im_end|>\\n' }}", "template_result_lost"),
}  # fmt: skip


def folder_with(folder: Path, template: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def lint(folder: Path, template: str) -> TemplateLint:
    result = lint_folder(folder_with(folder, template))
    assert result is not None
    return result


@pytest.mark.parametrize("template", [SOUND_JSON, SOUND_XML, SOUND_MISTRAL, SOUND_GEMMA])
def test_a_sound_template_has_no_fault(tmp_path: Path, template: str) -> None:
    result = lint(tmp_path, template)
    assert result.faults == []
    inherent = {"template_end_tag"} if template == SOUND_XML else set()  # number 4
    assert {limit.code for limit in result.limits} == inherent


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    sound, old, new, code = PLANTED[name]
    if not new:  # Qwen3.5's own way
        new = old.replace("arguments.items()", "arguments | items")
        sound = sound.replace("{%- if arguments is string %}", "{%- if false %}")
    faulty = sound.replace(old, new)
    assert faulty != sound
    line = faulty[: faulty.index(new)].count("\n") + 1
    result = lint(tmp_path, faulty)
    inherent = {"template_end_tag"} if sound.count("<parameter=' + key") else set()
    if code == "template_thinking_default":  # what the prompt adds is not in the next prompt
        inherent.add("template_prefix_changes")
    found = [*result.faults, *result.limits]
    assert {fault.code for fault in found} - inherent == {code}
    (named,) = {fault.line for fault in found if fault.code == code}
    if code == "template_form_differs":
        assert (
            "call.function.name" in faulty.splitlines()[named - 1]
        )  # the line that writes the other form
    elif code == "template_tools_ignored":
        assert named  # no line writes what is absent
    elif code in ("template_call_text", "template_prefix_changes") or "lost" in name:
        assert -2 < named - line < 8  # what is lost is missing before the piece that is named
    else:
        assert named in (line, line + 1)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_the_shipped_templates_have_no_fault(path: Path) -> None:
    result = lint_folder(path.parent)
    assert result is not None and result.faults == [] and result.form == "qwen_xml"


def test_a_template_of_another_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copyfile(TINY_ANNIE / "tokenizer.json", tmp_path / "tokenizer.json")
    assert lint(tmp_path, SOUND_JSON).faults == []
    other = SOUND_JSON.replace("<|im_start|>", "<|start_header_id|>")
    (found,) = [f for f in lint(tmp_path, other).faults if f.code == "template_tokens_unknown"]
    assert "<|start_header_id|>" in found.message and found.line


TRL = importlib.util.find_spec("trl")
NEEDS_TRL = pytest.mark.skipif(
    TRL is None, reason="TRL's copies of the templates: pip install --no-deps trl==1.16.0"
)
# Faults and limits of TRL's copies, as public threads state them (numbers of the list above).
TRL_COPIES = {
    "qwen3_6": ({}, {"template_arguments_text", "template_end_tag", "template_later_system", "template_developer",
                     "template_no_user", "template_prefix_changes", "template_control_tokens"}),
    "qwen3_8": ({}, {"template_arguments_text", "template_end_tag", "template_later_system", "template_developer",
                     "template_no_user", "template_control_tokens"}),
    "qwen3_5_think": ({"template_value_changed"}, {"template_prefix_changes", "template_arguments_text"}),
    "qwen3_5_nothink": ({"template_value_changed", "template_thinking_default"}, {"template_prefix_changes"}),
    "nemotron_3_super": ({"template_value_changed"}, {"template_arguments_text"}),
    "qwen2_5": ({"template_developer"}, {"template_arguments_text"}),
    "qwen3": ({"template_developer", "template_result_parts"}, {"template_prefix_changes"}),
    "qwen3_instruct_2507": ({"template_developer", "template_result_parts"}, set()),
    "qwen3_vl": ({"template_later_system", "template_developer", "template_null_content"}, set()),
    "llama3_1": ({"template_several_calls", "template_call_text"}, {"template_arguments_text"}),
    "llama3_2": ({"template_several_calls", "template_call_text"}, {"template_arguments_text"}),
    "gemma3": ({"template_tools_ignored", "template_tool_role"}, {"template_two_users"}),
    "gemma4": ({"template_value_changed", "template_argument_order", "template_call_text"}, set()),
}  # fmt: skip


@NEEDS_TRL
@pytest.mark.parametrize("name", TRL_COPIES)
def test_the_known_faults_of_real_templates_and_no_others(tmp_path: Path, name: str) -> None:
    assert TRL is not None and TRL.origin is not None
    source = Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja"
    result = lint(tmp_path, source.read_text())
    faults, limits = TRL_COPIES[name]
    assert {fault.code for fault in result.faults} == set(faults)
    assert {limit.code for limit in result.limits} >= limits


def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the reference: pip install annie-quant[quantize]")
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (TINY_ANNIE / "chat_template.jinja").read_text()
    tokenizer = FolderTokenizer(folder_with(tmp_path, template))
    named = conversations()
    replies = ChatTemplate(tokenizer, "x").render_all(list(named.values()))
    for name, reply in zip(named, replies, strict=True):
        fields = named[name]
        if reply.error:
            continue
        (expected,), _ = render_jinja_template(
            conversations=[fields["messages"]],
            chat_template=template,
            **{key: value for key, value in fields.items() if key != "messages"},
        )
        assert reply.text == expected, name
        assert sum(length for _, length in reply.lines) == len(reply.text)
    assert sum(not reply.error for reply in replies) > len(replies) / 2


def test_an_audit_has_the_lint_and_stays_sound(tmp_path: Path) -> None:
    """A fault of the template, which quantizing did not make, is no finding about the checkpoint."""
    source = zoo.bf16(tmp_path / "bf16")
    sound = aq.checkpoint.audit(source).template
    assert sound is not None and sound.faults == []
    faulty = SOUND_JSON.replace(CONTENT, "{{- message.content + '' }}")
    (source / "chat_template.jinja").write_text(faulty)
    audit = aq.checkpoint.audit(source)
    assert audit.template is not None
    assert [fault.code for fault in audit.template.faults] == ["template_null_content"]
    assert audit.template.family == "Qwen3" and not any(
        finding.code.startswith("template") for finding in audit.findings
    )
    shown = CliRunner().invoke(cli, ["audit", str(source)])
    line = faulty[: faulty.index("message.content + ''")].count("\n") + 1
    assert f"line {line}" in shown.output and "template_null_content" in shown.output
    stored = json.loads(CliRunner().invoke(cli, ["audit", str(source), "--json"]).stdout)
    assert stored["template"]["faults"][0]["line"] == line


def test_a_hostile_template_ends_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_LINT_SECONDS", 0.3)
    for template in (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}{{ messages | map('nofilter') }}",
        "",
    ):
        result = lint_folder(folder_with(tmp_path, template))
        assert result is not None and result.faults


LINES = [*SOUND_JSON.splitlines(), *SOUND_XML.splitlines()]


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_template_is_linted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Lines that are left out or exchanged give templates that are wrong in any way."""
    lines = list(data.draw(st.sampled_from([SOUND_JSON, SOUND_XML, SOUND_GEMMA])).splitlines())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = data.draw(st.sampled_from(["", *LINES]))
    folder = tmp_path_factory.mktemp("template")
    result = lint(folder, "\n".join(lines))
    assert all(0 < (fault.line or 1) <= len(lines) + 1 for fault in result.faults)


@pytest.mark.parametrize(
    ("line", "faulty", "code"),
    [
        (SECOND, "{%- for call in [] %}", "template_call_lost"),
        (SECOND, refusing("message.tool_calls", SECOND), "template_call_refused"),
        ("{%- endmacro -%}", "", "template_unusable"),
        (ROLE, "{{ raise_exception('never') }}", "template_unusable"),
    ],
)
def test_what_makes_a_template_useless_for_calls_is_named(
    line: str, faulty: str, code: str, tmp_path: Path
) -> None:
    assert line in SOUND_JSON
    (tmp_path / "chat_template.jinja").write_text(SOUND_JSON.replace(line, faulty))
    lint = lint_folder(tmp_path)
    assert lint is not None
    assert code in {fault.code for fault in lint.faults}
