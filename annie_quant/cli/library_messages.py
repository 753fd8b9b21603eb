"""Log records and warnings of libraries, which may quote a file: cleaned before they reach a terminal."""

from __future__ import annotations

import logging
import warnings

from annie_quant.printable import printable

MAX_MESSAGE = 2000


class CleanRecord(logging.LogRecord):
    """A log record whose text is printable."""

    def getMessage(self) -> str:
        return printable(super().getMessage(), MAX_MESSAGE, lines=True)


def clean_library_messages() -> None:
    """Clean everything that is logged or warned about in this process from now on."""
    logging.setLogRecordFactory(CleanRecord)
    warnings.formatwarning = _format


def _format(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__}: {printable(str(message), MAX_MESSAGE)}\n"
