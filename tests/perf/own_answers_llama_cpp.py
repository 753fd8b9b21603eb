"""Time of the model's own answers on a CPU: this package's engine against llama.cpp's server on a BF16 file of the same model.

    python tests/perf/own_answers_llama_cpp.py MODEL rows.jsonl --n 100 --threads 1 --slots 1,8

Both give greedy answers to the same prompts, with the same number of threads. llama.cpp's time includes the conversion to GGUF and
the start of its server, ours the loading of the model. Ours are computed as quantize does (own_answers.py), but no given answer
stays that the model would not write exactly.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil
import torch

from annie_quant import checkpoint
from annie_quant.core.progress import SILENT
from annie_quant.core.untrusted import decode_json
from annie_quant.data.rows import read_conversations
from annie_quant.offline.prompts import ScoredAnswer, Template, answers_of_row
from annie_quant.ops import serving
from annie_quant.ops.server_checks import native_body
from annie_quant.quantize import own_answers
from annie_quant.stream.client import Request, http_reply, run

Tokens = list[list[int]]


def ours(model: Path, template: Template, given: list[ScoredAnswer]) -> Tokens:
    own_answers.MIN_SHARE_OF_OWN_TOKENS = 1.01  # no answer stays that differs in one token
    with tempfile.TemporaryDirectory() as cache:
        answered = own_answers.own_answers(model, template, given, SILENT, Path(cache))
    ends = template.end_tokens
    return [[t for t in answer.target if t not in ends] for answer in answered.answers]


def of_llama_cpp(
    model: Path, template: Template, given: list[ScoredAnswer], threads: int, slots: int
) -> tuple[Tokens, dict[str, float]]:
    limit = own_answers._MAX_ANSWER_TOKENS
    longest = max(len(answer.prompt) for answer in given) + limit
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        start = time.monotonic()
        checkpoint.convert(model, "gguf", output=file, type="BF16")
        seconds["convert"] = time.monotonic() - start
        start = time.monotonic()
        with serving.start(
            file, runtime="llama.cpp", port=0, context=longest, parallel=slots, threads=threads
        ) as server:
            seconds["start"] = time.monotonic() - start
            start = time.monotonic()
            more = {"return_tokens": True, "cache_prompt": True}
            requests = [
                Request(
                    f"{server.url}/completion",
                    json=native_body(answer.prompt, limit) | more,
                    timeout_s=3600,
                )
                for answer in given
            ]
            timings = run(requests, slots, max_event_bytes=1 << 24, max_answer_bytes=1 << 24)
            seconds["answer"] = time.monotonic() - start
            seconds["processor time of the server"] = processor_seconds()
    replies = [decode_json(http_reply(timings, i).body) for i in range(len(given))]
    return [[t for t in r["tokens"] if t not in template.end_tokens] for r in replies], seconds


def processor_seconds() -> float:
    """Return the processor time of this process's children, such as a server: on a busy machine elapsed time says little."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", default="1,8")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    template = Template(arguments.model)
    given: list[ScoredAnswer] = []
    for row in read_conversations(arguments.rows, arguments.n):
        given += answers_of_row(template, row)
    start = time.monotonic()
    before = time.process_time()
    own = ours(arguments.model, template, given)
    our_seconds = time.monotonic() - start
    our_processor = time.process_time() - before
    n_tokens = sum(map(len, own))
    prompt_tokens = sum(len(answer.prompt) for answer in given)
    n = len(given)
    print(f"{n} answers to {prompt_tokens:,} tokens of prompts; ours have {n_tokens:,} tokens")
    print(
        f"ours: {our_seconds:.0f} s, {our_seconds / n:.2f} s per answer, {our_processor:.0f} s of a processor",
        flush=True,
    )
    for slots in map(int, arguments.slots.split(",")):
        theirs, seconds = of_llama_cpp(arguments.model, template, given, arguments.threads, slots)
        on_server = seconds.pop("processor time of the server")
        total = sum(seconds.values())
        same = sum(a == b for a, b in zip(own, theirs, strict=True))
        steps = ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items())
        processor = f"{on_server:.0f} s of a processor in the server"
        print(f"llama.cpp, {slots} slots: {total:.0f} s ({steps}), {total / n:.2f} s per answer")
        print(f"  {processor}")
        print(f"  {our_seconds / total:.2f} times as fast; {same} of {n} answers equal", flush=True)


if __name__ == "__main__":
    main()
