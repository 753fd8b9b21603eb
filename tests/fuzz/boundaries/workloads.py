"""Workload files: read, sampled, turned into requests, and judged against answers."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Sandbox, limited_time, one_line_errors

from annie_quant.core.files import ASSETS

PER_COMMAND = 20


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    from annie_quant import judge

    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    sources = []
    for path in sorted((ASSETS / "workloads").glob("*.json")):
        document = json.loads(path.read_bytes())
        document["cases"] = document["cases"][:2]
        sources.append(document)
    file = sandbox.inputs / "workload.json"
    call = {"id": "1", "name": "search_memory", "arguments": "{}"}
    answers = [judge.Answer(text="Tokyo. **x**"), judge.Answer(tool_calls=[call])]

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        file.write_bytes(hostile.damaged(encode(hostile.changed(hostile.random.choice(sources)))))
        if int(seed.partition("/")[2]) % PER_COMMAND == 0:
            sandbox.clear_output()
            options = ("--workloads", file, "--output", sandbox.output / "run")
            sandbox.run("bench", "--backend-a", "a", closed, *options)
            return 1
        with limited_time("a workload"), one_line_errors():
            for workload in judge.sample(judge.load_workloads([str(file)]), 2, 0):
                for item in workload.cases:
                    for turn in range(min(item.n_turns, 3)):
                        history = [{"role": "assistant", "content": "x"}] * turn
                        json.dumps(workload.request(item, turn, history, "m"))
                        for answer in answers:
                            judge.faults(answer, item.at_turn(turn), workload)
        return 1

    yield case
