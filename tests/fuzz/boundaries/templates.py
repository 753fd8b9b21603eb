"""Chat templates and tokenizer files: loading a folder's tokenizer and rendering conversations with its template.

A template is a random program over the statements that templates use. It renders up to PER_PROGRAM conversations, each a case,
since the start of its process takes most of the time. One of PER_LOAD programs is loaded with changed tokenizer files.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Finding, Sandbox, limited_time, one_line_errors
from paths import TINY_ANNIE

PER_LOAD, PER_PROGRAM = 20, 20
SECONDS = 0.2  # limit of one rendering here, so that endless ones do not fill the run
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "config.json",
)
EXPRESSIONS = (
    "messages", "messages[0].content", "messages | tojson", "tools", "tools | tojson(indent=4)", "loop.index", "m", "m.role",
    "range(9)", "range(99999)", "'x' * 10", "'x' * 3000000000", "9 ** 99", "namespace(n=0)", "''.__class__", "self", "caller",
    "lipsum(3)", "cycler", "raise_exception('no')", "strftime_now('%Y')", "messages | length", "m.content | trim", "none.x",
    "'%999999999d' | format(1)", "messages[::-1]", "1 / 0", "eos_token", "'\x1b[31m'", "dict(a=1).items()", "x",
)  # fmt: skip


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    from annie_quant.checkpoint import chat_template
    from annie_quant.offline.prompts import Template

    folder = sandbox.inputs / "model"
    folder.mkdir()
    copy_tokenizer(folder)
    usual = Template(folder)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    before = chat_template.MAX_SECONDS
    chat_template.MAX_SECONDS = SECONDS

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        with limited_time("loading a template"), one_line_errors():
            if hostile.random.randrange(PER_LOAD) == 0:
                change_files(hostile, folder)
                template = Template(folder)
            else:
                template = usual
                template.tokenizer.chat_template = program(hostile)
                template.chat_template = chat_template.ChatTemplate(template.tokenizer, "x")
            for done in range(1, min(left, PER_PROGRAM) + 1):
                with limited_time("a template"), one_line_errors():
                    text = template.render(
                        conversation(hostile),
                        tools if hostile.random.random() < 0.3 else None,
                        False,
                    )
                    if not isinstance(text, str) or len(text) > chat_template.MAX_TEXT:
                        raise Finding(f"rendered {type(text).__name__}")
                if not all(worker.alive for worker in [*chat_template._workers.values()][-1:]):
                    return done  # the next conversation would need another process
            return done
        return 1

    try:
        yield case
    finally:
        chat_template.MAX_SECONDS = before


def conversation(hostile: Hostile) -> list[dict[str, Any]]:
    changed = hostile.changed(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    )
    messages = json.loads(json.dumps(changed, default=lambda raw: None))
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def copy_tokenizer(folder: Path) -> None:
    for name in FILES:
        shutil.copyfile(TINY_ANNIE / name, folder / name)


def change_files(hostile: Hostile, folder: Path) -> None:
    copy_tokenizer(folder)
    name = hostile.random.choice(FILES[:4])
    data = (folder / name).read_bytes()
    if name.endswith("json"):
        data = encode(hostile.changed(json.loads(data)))
    (folder / name).write_bytes(hostile.damaged(data))


def program(hostile: Hostile, depth: int = 3) -> str:
    """Return a random template."""
    parts = []
    for _ in range(hostile.random.randrange(1, 4)):
        kind, expression = hostile.random.random(), hostile.random.choice(EXPRESSIONS)
        if kind < 0.5 or depth == 0:
            parts.append("{{ " + expression + " }}")
        elif kind < 0.7:
            parts.append(
                "{% for m in " + expression + " %}" + program(hostile, depth - 1) + "{% endfor %}"
            )
        elif kind < 0.8:
            parts.append(
                "{% if " + expression + " %}" + program(hostile, depth - 1) + "{% endif %}"
            )
        elif kind < 0.87:
            parts.append("{% set x = " + expression + " %}" + program(hostile, depth - 1))
        elif kind < 0.92:
            parts.append(
                "{% macro f() %}" + program(hostile, depth - 1) + "{{ f() }}{% endmacro %}{{ f() }}"
            )
        else:
            end = (
                "{%",
                "{{",
                "{% include '/etc/passwd' %}",
                "{% break %}",
                "{# x",
                hostile.text()[:500],
            )
            parts.append(hostile.random.choice(end))
    return "".join(parts)
