"""Time per output token of one stream in vLLM on a CPU, after prompts of some lengths. Imports vLLM alone, not this package.

    python tests/perf/vllm_tpot.py CHECKPOINT --depths 128,8192 --tokens 33

Prompts are random tokens; the engine runs in this process, without torch.compile, and each of its steps is timed: the first token's
step is left out. Prints a line of JSON per depth: n, seconds to the first token, median and quartiles in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from vllm_answers import kernel_name, model_of


def token_seconds(llm: Any, depth: int, tokens: int) -> Iterator[float]:
    """Yield the seconds to the first token, then those of each further one."""
    from vllm import SamplingParams

    prompt = [random.randrange(10, 1000) for _ in range(depth)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(str(depth), {"prompt_token_ids": prompt}, sampling)
    start = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        if llm.llm_engine.step():  # without an output it was a part of the prompt
            end = time.perf_counter()
            yield end - start
            start = end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--depths", default="128")
    parser.add_argument("--tokens", type=int, default=33)
    arguments = parser.parse_args()
    from vllm import LLM

    depths = list(map(int, arguments.depths.split(",")))
    llm = LLM(
        arguments.checkpoint, dtype="bfloat16", enforce_eager=True, max_model_len=max(depths) + arguments.tokens + 16,
        max_num_seqs=1, max_num_batched_tokens=2048, enable_prefix_caching=False, disable_log_stats=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    random.seed(0)
    for depth in depths:
        first, *times = token_seconds(llm, depth, arguments.tokens)
        quartiles = [round(1e3 * t, 2) for t in statistics.quantiles(times)]
        line = {
            "kernel": kernel_name(model_of(llm)),
            "depth": depth,
            "n": len(times),
            "first_s": round(first, 1),
        }
        print(json.dumps(line | {"quartiles_ms": quartiles}), flush=True)


if __name__ == "__main__":
    main()
