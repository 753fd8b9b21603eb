"""Render one chat template in a process with limited memory.

Started by chat_template.py; reads and writes JSON lines.

    {"template", "memory_bytes", "seconds"}            first line
    {variables}        →   {"text"} or {"error"}       one conversation
    [{variables}, …]   →   [{"text", "lines"} or {"error", "line"}, …]   several, with lines of the template

The environment is that of transformers (utils/chat_template_utils.py): a sandbox in which a
template can change nothing, with the same white-space rules, filters and functions. A template can
still loop or allocate without end, so its process has limits.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes, parser

TEMPLATE_FILE = "<template>"  # jinja2's name of a template that is no file


def main() -> None:
    """Answer each line of stdin until it ends."""
    sys.path.pop(0)  # this file's folder, whose modules must not shadow others
    settings = json.loads(sys.stdin.readline())
    environment = make_environment()
    # The timer's signal ends the process even if the parent has ended. It counts processor time,
    # because a sound template may wait for a long time on a busy machine.
    seconds = settings["seconds"]
    template: Template | None = None
    limit = (settings["memory_bytes"], settings["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, limit)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            template = template or environment.from_string(settings["template"])
            request = json.loads(line)
            reply: object
            if isinstance(request, list):
                reply = [render_with_lines(template, variables) for variables in request]
            else:
                reply = {"text": template.render(**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        text = json.dumps(reply) + "\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(text)
        sys.stdout.flush()


def render_with_lines(template: Template, variables: dict[str, object]) -> dict[str, object]:
    """Return a rendered text, and which line of the template wrote each piece of it.

    "lines" has [line, characters] per piece. What a macro writes has the line that calls it. An error has the
    line that raised it.
    """
    pieces = []
    lines = []
    try:
        generator = template.root_render_func(template.new_context(variables))
        for piece in generator:
            line = template.get_corresponding_lineno(generator.gi_frame.f_lineno)  # type: ignore[attr-defined]
            pieces.append(str(piece))
            lines.append([line, len(pieces[-1])])
    except Exception as error:
        line = 0
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == TEMPLATE_FILE:
                line = template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return {"error": f"{type(error).__name__}: {str(error)[:500]}", "line": line}
    return {"text": "".join(pieces), "lines": lines}


def make_environment() -> Environment:
    """Return the jinja2 environment in which transformers renders chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} ...

        {% endgeneration %} marks the assistant's text for training; it renders its content.
        """

        tags = {"generation"}  # noqa: RUF012 - jinja2's interface

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Callable[[], str]) -> str:
            return caller()

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    main()
