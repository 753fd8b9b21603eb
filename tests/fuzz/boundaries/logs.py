"""Conversations as JSON lines: the check of a data set, and what quantization and evaluation read of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Sandbox, limited_time, one_line_errors

ROWS = 3


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    from annie_quant import data
    from annie_quant.checkpoint.chat_template import with_decoded_calls
    from annie_quant.data.rows import read_conversations

    generated = sandbox.inputs / "made.jsonl"
    data.generate("annie", "offline", 20, generated, 0)
    rows = [json.loads(line) for line in generated.read_bytes().splitlines()]
    file = sandbox.inputs / "rows.jsonl"

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        chosen = hostile.random.sample(rows, ROWS)
        changed = hostile.random.randrange(ROWS)
        lines = [
            encode(hostile.changed(row) if i == changed else row).replace(b"\n", b" ")
            for i, row in enumerate(chosen)
        ]
        file.write_bytes(hostile.damaged(b"\n".join(lines) + b"\n"))
        if hostile.random.random() < 0.5:
            sandbox.run("data", "--check", "--output", file, "--persona", "annie")
            return 1
        with limited_time("rows"), one_line_errors():
            read = read_conversations(file)
            data.check_prompt_hash(file, allow=True)
            for row in read:
                for message in row["messages"]:
                    with_decoded_calls(message)
        return 1

    yield case
