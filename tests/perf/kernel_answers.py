"""Greedy answers in the real vLLM under Marlin and under this package's kernel, and under CUDA graphs and without.

    python tests/perf/kernel_answers.py run CHECKPOINT PROMPTS.json OUT.json --kernel ours --mode eager --cuts 64,48 --seconds 60
    python tests/perf/kernel_answers.py compare A.json B.json --cut-b 48
    python tests/perf/kernel_answers.py steps EAGER.steps.jsonl ... --against GRAPHS.steps.jsonl ...

run: answers all prompts (the format of vllm_answers.py), as many at a time as each of --cuts names; then, for each of --chunks,
generates --steps tokens without an end with 1, 4, 16 and 64 streams that start together, so that each step has the same number
of rows in every mode. OUT.json is written after each part of the answers, OUT.steps.jsonl has a line per chunk and number of
streams.
compare: equal answers; where one differs first, the difference of both tokens' logits in A, in bf16 steps of the larger one
(0 or 1: rounding decides). Of a checkpoint with itself under another cut it is the share that the order of sums alone changes.
steps: decode steps and tokens that both kinds of file have, and how many chunks differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

STREAMS = (64, 16, 4, 1)


def run(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    os.environ["ANNIE_QUANT_VLLM_KERNEL"] = os.environ["ANNIE_QUANT_VLLM_EXPERTS"] = (
        "1" if args.kernel == "ours" else "0"
    )
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from serve_9b import GPU_OPTIONS
    from vllm import LLM
    from vllm_answers import kernel_name, model_of, register_text_only  # one process, fast start

    options: dict[str, Any] = {"enforce_eager": args.mode == "eager"}
    if args.mode == "graphs":
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(STREAMS),
        }
    if torch.cuda.is_available():
        options |= {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 1 << 30, **GPU_OPTIONS}
    llm = LLM(
        register_text_only(args.checkpoint), dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False,
        disable_log_stats=True, logprobs_mode="raw_logits", **options,
    )  # fmt: skip
    rows = json.loads(args.prompts.read_text())
    document: dict[str, Any] = {"kernel": kernel_name(model_of(llm)), "mode": args.mode, "cuts": {}}
    print(
        document["kernel"],
        "ready",
        round(args.seconds - (end - time.monotonic()), 1),
        "s",
        flush=True,
    )
    for cut in [int(c) for c in args.cuts.split(",") if c]:
        answers = document["cuts"][str(cut)] = {}
        for start in range(0, len(rows), cut):
            if time.monotonic() > end - 5:
                break
            answers |= answer(llm, rows, range(start, min(start + cut, len(rows))))
            partial = args.output.with_suffix(".partial")
            partial.write_text(json.dumps(document))
            partial.replace(args.output)
        print(
            len(answers),
            "answers,",
            cut,
            "at a time, after",
            round(args.seconds - (end - time.monotonic()), 1),
            "s",
            flush=True,
        )
    with args.output.with_suffix(".steps.jsonl").open("w") as f:
        for chunk in range(*[int(n) for n in args.chunks.split(":")]):
            for streams in STREAMS:
                if time.monotonic() > end - 5:
                    return
                begin = time.monotonic()
                tokens = without_end(llm, rows, chunk, streams, args.steps)
                f.write(json.dumps({"chunk": chunk, "streams": streams, "tokens": tokens}) + "\n")
                f.flush()
                seconds = round(time.monotonic() - begin, 1)
                print(
                    "chunk",
                    chunk,
                    streams,
                    "streams,",
                    args.steps,
                    "steps in",
                    seconds,
                    "s",
                    flush=True,
                )


def answer(llm: Any, rows: list[dict[str, Any]], part: range) -> dict[str, Any]:
    """Return index -> [token ids, [{token: logit} of the best at each position]] of some prompts, answered together."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=rows[i]["max_tokens"],
            stop_token_ids=rows[i]["ends"],
            logprobs=4,
        )
        for i in part
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": rows[i]["prompt"]} for i in part], sampling, use_tqdm=False
    )
    result = {}
    for index, output in zip(part, outputs, strict=True):
        first = output.outputs[0]
        best = [
            {int(t): round(e.logprob, 4) for t, e in position.items()}
            for position in first.logprobs or []
        ]
        result[str(index)] = [list(first.token_ids), best]
    return result


def without_end(
    llm: Any, rows: list[dict[str, Any]], chunk: int, streams: int, steps: int
) -> list[list[int]]:
    """Return `steps` tokens of each of `streams` prompts, other ones per chunk."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
    ] * streams
    prompts = [
        rows[(chunk * STREAMS[0] + i) % len(rows)]["prompt"][chunk % 8 :][-64:]
        for i in range(streams)
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def bf16_steps(one: float, other: float) -> float:
    """Return the difference of two logits in bf16 steps of the larger one."""
    step = 2.0 ** (math.frexp(max(abs(one), abs(other), 2.0**-100))[1] - 8)
    return (one - other) / step


def compare(a_path: Path, b_path: Path, cut_a: str, cut_b: str) -> dict[str, Any]:
    a, b = json.loads(a_path.read_text()), json.loads(b_path.read_text())
    answers_a, answers_b = a["cuts"][cut_a], b["cuts"][cut_b]
    common = sorted(set(answers_a) & set(answers_b), key=int)
    margins: list[dict[str, Any]] = []
    for index in common:
        (one, best), (two, _) = answers_a[index], answers_b[index]
        if one == two:
            continue
        at = next((i for i, (s, t) in enumerate(zip(one, two, strict=False)) if s != t), None)
        row: dict[str, Any] = {"prompt": int(index), "at": at}
        if at is not None and str(two[at]) in best[at]:
            row["logits"] = [best[at][str(one[at])], best[at][str(two[at])]]
            row["bf16_steps"] = round(bf16_steps(*row["logits"]), 3)
        margins.append(row)
    return {
        "a": f"{a['kernel']} {a['mode']}, {cut_a} at a time",
        "b": f"{b['kernel']} {b['mode']}, {cut_b} at a time",
        "answers": len(common),
        "equal": len(common) - len(margins),
        "differ": margins,
    }


def compare_steps(files: list[Path], against: list[Path]) -> dict[str, Any]:
    """Return how many steps and tokens both have and which (chunk, streams) differ."""

    def read(paths: list[Path]) -> dict[tuple[int, int], list[list[int]]]:
        lines = [
            line
            for path in paths
            if path.exists()
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]
        return {(row["chunk"], row["streams"]): row["tokens"] for row in map(json.loads, lines)}

    one, two = read(files), read(against)
    common = sorted(set(one) & set(two))
    return {
        "decode_steps": {
            s: sum(len(one[key][0]) - 1 for key in common if key[1] == s) for s in STREAMS
        },
        "tokens": sum(len(stream) for key in common for stream in one[key]),
        "runs": len(common),
        "different": [key for key in common if one[key] != two[key]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("checkpoint")
    one.add_argument("prompts", type=Path)
    one.add_argument("output", type=Path)
    one.add_argument("--kernel", choices=("marlin", "ours"), default="ours")
    one.add_argument("--mode", choices=("eager", "graphs", "compiled"), default="eager")
    one.add_argument("--seconds", type=float, default=120)
    one.add_argument(
        "--cuts", default="64", help="answers at a time; several: 64,48; empty: no answers"
    )
    one.add_argument(
        "--chunks",
        default="0",
        help="of generation without an end: FIRST:STOP:STEP, as of range; 0: none",
    )
    one.add_argument("--steps", type=int, default=512, help="tokens of a chunk, less than 1,984")
    two = commands.add_parser("compare")
    two.add_argument("a", type=Path)
    two.add_argument("b", type=Path)
    two.add_argument("--cut-a", default="64")
    two.add_argument("--cut-b", default="64")
    three = commands.add_parser("steps")
    three.add_argument("files", type=Path, nargs="+")
    three.add_argument("--against", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    elif args.command == "steps":
        print(json.dumps(compare_steps(args.files, args.against)))
    else:
        print(json.dumps(compare(args.a, args.b, args.cut_a, args.cut_b)))


if __name__ == "__main__":
    main()
