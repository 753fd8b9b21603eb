"""Persona files: a data set made with them by the offline teacher, and the check of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Sandbox

from annie_quant.core.files import ASSETS


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    sources = [
        json.loads(path.read_bytes()) for path in sorted((ASSETS / "personas").glob("*.json"))
    ]
    file = sandbox.inputs / "persona.json"

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        file.write_bytes(hostile.damaged(encode(hostile.changed(hostile.random.choice(sources)))))
        sandbox.clear_output()
        sandbox.run(
            "data",
            "--persona",
            file,
            "--teacher",
            "offline",
            "--n",
            5,
            "--output",
            sandbox.output / "x.jsonl",
        )
        return 1

    yield case
