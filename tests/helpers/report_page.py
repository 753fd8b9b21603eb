"""Reading a report back: the shown figures by their data-k, and what may act in a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Read(HTMLParser):
    """`shown`: [(data-k, first line of the cell, second line)]. `tags`, `attributes`: all that stand in the page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shown: list[list[str]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.in_cell = self.in_small = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag in ("td", "span"):
            key = dict(attrs).get("data-k")
            self.in_cell = key is not None
            if key is not None:
                self.shown.append([key, "", ""])
        self.in_small = tag == "small"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "span"):
            self.in_cell = False
        if tag == "small":
            self.in_small = False

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.in_cell:
            self.shown[-1][2 if self.in_small else 1] += data


def first_number(words: str) -> tuple[float, float] | None:
    """The first number in a cell and half a unit of its last digit; None for a dash."""
    match = re.search(r"[-−+]?[\d\u202f]*\.?\d+", words)
    if not match:
        return None
    digits = match.group().replace("\u202f", "").replace("−", "-")
    decimals = len(digits.partition(".")[2])
    return float(digits), 0.5000001 * 10**-decimals
