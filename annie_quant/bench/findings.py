"""The findings of a benchmark in words. assets/confounds.json has each code's severity and message."""

from __future__ import annotations

from typing import cast

import msgspec

from annie_quant.core.files import ASSETS
from annie_quant.documents import Confound
from annie_quant.documents.results import Severity


class FindingText(msgspec.Struct):
    """A code's severity, unless a finding states another one, and its message with placeholders."""

    severity: Severity
    message: str


TEXTS = msgspec.json.decode((ASSETS / "confounds.json").read_bytes(), type=dict[str, FindingText])


def finding(code: str, *backends: str, **values: object) -> Confound:
    """Return a finding about these backends.

    values: what the message's placeholders stand for; `severity`: instead of the code's.
    """
    text = TEXTS[code]
    severity = cast("Severity", values.pop("severity", text.severity))
    names = " and ".join(backends)
    listed = ", ".join(backends)
    message = text.message.format(
        *backends,
        names=names,
        listed=listed,
        **values,
    )
    return Confound(
        code=code,
        severity=severity,
        message=message,
        backends=list(backends),
    )
