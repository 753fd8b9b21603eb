"""Pages from the templates in assets/templates: HTML with the style, script and policy of every page, and Markdown.

Every value that a template writes is made safe: `visible` and escaped in HTML, `inert` in Markdown. Only Markup is written as
it is.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING

from annie_quant.core.files import ASSETS
from annie_quant.core.text import inert, visible

if TYPE_CHECKING:
    import jinja2

TEMPLATES = ASSETS / "templates"


@cache
def _environment(markdown: bool) -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    def safe(value: object) -> object:
        if isinstance(value, Markup):
            return value
        return Markup(inert(value)) if markdown else visible(value)  # noqa: S704, inert() is the escaping of Markdown

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=safe,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["safe"] = Markup
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment


def render_html(name: str, marks: str, **values: object) -> str:
    """Return the page of an HTML template. marks: the style of its drawings, after that of every page.

    The Content-Security-Policy allows the page's own script by hash and nothing else, so that text from a model cannot act even
    where it came through unescaped.
    """
    style, script = ((TEMPLATES / n).read_text(encoding="utf-8") for n in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment(False).get_template(name)
    return page.render(style=style + marks, script=script, script_hash=digest, **values)


def render_markdown(name: str, **values: object) -> str:
    """Return the text of a Markdown template, with at most one blank line in a row."""
    text = _environment(True).get_template(name).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
