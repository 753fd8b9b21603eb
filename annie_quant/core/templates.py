"""Texts from the templates in assets/templates: HTML with the style, script and policy of every page, Markdown, and plain text.

Every value that a template of a page writes is made safe: `visible` and escaped in HTML, `inert` in
Markdown. Only Markup is written as it is.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from functools import cache
from typing import TYPE_CHECKING

from annie_quant.core.files import ASSETS
from annie_quant.core.text import inert, visible

if TYPE_CHECKING:
    import jinja2

TEMPLATES = ASSETS / "templates"


@cache
def _environment(suffix: str) -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    def safe(value: object) -> object:
        if suffix == ".txt" or isinstance(value, Markup):
            return value
        return visible(value) if suffix == ".html" else Markup(inert(value))  # noqa: S704, inert() is Markdown's escaping

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=suffix != ".txt",  # noqa: S701, .txt is for terminals and models
        finalize=safe,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals["safe"] = Markup
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment


def render_text(name: str, **values: object) -> str:
    """Return the text of a .txt template: values are written as they are."""
    return _environment(".txt").get_template(name).render(**values)


def render_html(name: str, marks: str, **values: object) -> str:
    """Return the page of an HTML template.

    marks: the style of its drawings, after that of every page.

    The Content-Security-Policy allows the page's own script by hash and nothing else, so that text
    from a model cannot act even where it came through unescaped.
    """
    style, script = (
        (TEMPLATES / n).read_text(encoding="utf-8") for n in ("report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment(".html").get_template(name)
    return page.render(style=style + marks, script=script, script_hash=digest, **values)


def render_svg(name: str, **values: object) -> str:
    """Return the drawing of an SVG template, without the white space between its shapes."""
    return re.sub(r">\s+<", "><", _environment(".html").get_template(name).render(**values)).strip()


def render_markdown(name: str, **values: object) -> str:
    """Return the text of a Markdown template, with at most one blank line in a row."""
    text = _environment(".md").get_template(name).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
