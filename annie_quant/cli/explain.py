"""`annie-quant explain`: what a finding's code or an exit code means, and what to do."""

from __future__ import annotations

import difflib

import click

from annie_quant.cli.common import console, emit, json_option
from annie_quant.errors import EXIT_CODES, UsageError


@click.command()
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Explain CODE: that of an audit's finding or a checkpoint's error, or an exit code. Without CODE, list all."""
    from annie_quant.checkpoint.codes import CODES
    from annie_quant.checkpoint.loader_support import DEADLY

    if code is None:
        if as_json:
            emit({**{c: e._asdict() for c, e in CODES.items()}, **{str(n): m for n, m in EXIT_CODES.items()}})
            return
        for number, meaning in EXIT_CODES.items():
            console.line(f"exit code {number}: {meaning}")
        for name, explanation in CODES.items():
            console.line(f"{name}: {explanation.meaning}")
        return
    if code.isdecimal() and int(code) in EXIT_CODES:
        result = {"code": code, "meaning": f"Exit code {code}: {EXIT_CODES[int(code)]}."}
    elif code in CODES:
        servers = "cannot load the checkpoint, or their answers are useless" if code in DEADLY else None
        result = {"code": code, **CODES[code]._asdict(), **({"servers": servers} if servers else {})}
    else:
        near = difflib.get_close_matches(code, CODES, 3)
        similar = f"; similar: {', '.join(near)}" if near else ""
        raise UsageError(f"unknown code {code[:60]!r}{similar}", "annie-quant explain lists all codes")
    if as_json:
        emit(result)
        return
    console.line(result["meaning"])
    for key in ("servers", "fix"):
        if key in result:
            console.line(f"{key}: {result[key]}")
