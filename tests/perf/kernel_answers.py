"""Greedy answers in the real vLLM under Marlin and under this package's kernel, and under CUDA graphs and without.

    python tests/perf/kernel_answers.py run CHECKPOINT PROMPTS.json OUT.json --kernel ours --mode eager --seconds 60
    python tests/perf/kernel_answers.py compare A.json B.json

run: answers all prompts (the format of vllm_answers.py) with 64 at a time, then generates --steps tokens without an end with 1, 4,
16 and 64 streams that start together, so that each step has the same number of rows in every mode. Written after each part.
compare: equal answers; where one differs first, the difference of both tokens' log-probabilities in A (near zero: rounding
decides); and the equal tokens of the fixed streams.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STREAMS = (64, 16, 4, 1)


def run(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    os.environ["ANNIE_QUANT_VLLM_KERNEL"] = "1" if args.kernel == "ours" else "0"
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from vllm import LLM, SamplingParams
    from vllm_answers import kernel_name, model_of, register_text_only  # one process, fast start

    options: dict[str, Any] = {"enforce_eager": args.mode == "eager"}
    if args.mode == "graphs":
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(STREAMS),
        }
    if torch.cuda.is_available():
        options |= {
            "gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 4 << 30, "attention_backend": "TRITON_ATTN",
            "additional_config": {"gdn_prefill_backend": "triton"}, "mamba_ssm_cache_dtype": "float32",
        }  # fmt: skip
    llm = LLM(
        register_text_only(args.checkpoint), dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False,
        disable_log_stats=True, **options,
    )  # fmt: skip
    rows = json.loads(args.prompts.read_text())
    document: dict[str, Any] = {"kernel": kernel_name(model_of(llm)), "mode": args.mode, "answers": {}, "streams": {}}
    print(document["kernel"], "ready", round(args.seconds - (end - time.monotonic()), 1), "s", flush=True)

    def save() -> None:
        partial = args.output.with_suffix(".partial")
        partial.write_text(json.dumps(document))
        partial.replace(args.output)

    for start in range(0, len(rows), 64):
        if time.monotonic() > end - 5:
            break
        part = rows[start : start + 64]
        sampling = [
            SamplingParams(temperature=0, max_tokens=r["max_tokens"], stop_token_ids=r["ends"], logprobs=4)
            for r in part
        ]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in part], sampling, use_tqdm=False)
        for index, output in enumerate(outputs, start):
            first = output.outputs[0]
            best = [{int(t): round(e.logprob, 4) for t, e in position.items()} for position in first.logprobs or []]
            document["answers"][str(index)] = [list(first.token_ids), best]
        save()
    for streams in STREAMS:
        if time.monotonic() > end - 5:
            break
        sampling = [SamplingParams(temperature=0, max_tokens=args.steps, ignore_eos=True)] * streams
        same = [{"prompt_token_ids": rows[i % len(rows)]["prompt"][-64:]} for i in range(streams)]
        begin = time.monotonic()
        outputs = llm.generate(same, sampling, use_tqdm=False)
        document["streams"][str(streams)] = [list(o.outputs[0].token_ids) for o in outputs]
        print(streams, "streams,", args.steps, "steps in", round(time.monotonic() - begin, 1), "s", flush=True)
        save()


def compare(a_path: Path, b_path: Path) -> dict[str, Any]:
    a, b = json.loads(a_path.read_text()), json.loads(b_path.read_text())
    common = sorted(set(a["answers"]) & set(b["answers"]), key=int)
    gaps: list[float | None] = []
    for index in common:
        (one, best), (two, _) = a["answers"][index], b["answers"][index]
        at = next((i for i, (s, t) in enumerate(zip(one, two, strict=False)) if s != t), None)
        if at is not None and str(one[at]) in best[at]:
            other = best[at].get(str(two[at]))
            gaps.append(None if other is None else round(best[at][str(one[at])] - other, 4))
        elif one != two:
            gaps.append(None)
    tokens = {}
    for streams in sorted(set(a["streams"]) & set(b["streams"]), key=int):
        pairs = list(zip(a["streams"][streams], b["streams"][streams], strict=True))
        tokens[streams] = {
            "steps": len(pairs[0][0]),
            "tokens": sum(len(s) for s, _ in pairs),
            "equal_streams": sum(s == t for s, t in pairs),
        }
    return {
        "a": f"{a['kernel']} {a['mode']}",
        "b": f"{b['kernel']} {b['mode']}",
        "answers": len(common),
        "equal": len(common) - len(gaps),
        "gaps": sorted(gaps, key=lambda g: (g is not None, g)),
        "streams": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("checkpoint")
    one.add_argument("prompts", type=Path)
    one.add_argument("output", type=Path)
    one.add_argument("--kernel", choices=("marlin", "ours"), default="ours")
    one.add_argument("--mode", choices=("eager", "graphs", "compiled"), default="eager")
    one.add_argument("--seconds", type=float, default=120)
    one.add_argument("--steps", type=int, default=512)
    two = commands.add_parser("compare")
    two.add_argument("a", type=Path)
    two.add_argument("b", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        print(json.dumps(compare(args.a, args.b)))


if __name__ == "__main__":
    main()
