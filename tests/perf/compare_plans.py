"""Compare the launch plans of two builds of _gemm; neither needs a GPU.

    python tests/perf/compare_plans.py OLD/annie_quant/_gemm*.so

For each device of tests/helpers/gemm_module.py, each shape and each number of tokens: the plan by each path and by `auto`, its
shared memory and workspace, or the refusal; the same for the grouped products of a mixture's experts. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from compare_codec_builds import load
from gemm_module import DEVICES

from annie_quant import _gemm

NUMBERS = {
    "auto": 0,
    "skinny": 1,
    "tiled": 2,
    "wgmma": 3,
}  # of the paths, which older builds took instead of names
MOST_FIELDS = 8  # of a plan
DIMENSIONS = (
    1,
    16,
    40,
    128,
    272,
    768,
    1008,
    1024,
    2048,
    4096,
    5120,
    8192,
    12288,
    17408,
    24576,
    81920,
    248320,
)
TOKENS = (
    *range(1, 34),
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    192,
    255,
    256,
    257,
    512,
    1000,
    1024,
    2048,
    4096,
    16384,
    100000,
)
EXPERTS = ((8, 2), (128, 8), (256, 8), (512, 10))  # and the experts per token
PAIRS = (1, 2, 8, 10, 64, 100, 640, 1280, 4096, 40960, 327680)
GROUPED = ((512, 2048), (2048, 512), (1536, 4096), (4096, 1408), (256, 48))


def answer(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:  # a CudaError is a RuntimeError
        return str(error)


def product(
    module: ModuleType, by_name: bool, m: int, n: int, k: int, path: str, device: tuple
) -> Any:
    plan = answer(module.plan, m, n, k, path if by_name else NUMBERS[path], device)
    if isinstance(plan, str):
        return plan
    name = (
        plan[0] if by_name else next(name for name, number in NUMBERS.items() if number == plan[0])
    )
    fields = (
        *plan[1],
        *(0,) * (MOST_FIELDS - len(plan[1])),
    )  # an older build has fewer; 0 is what it did
    return name, fields, answer(module.plan_needs, m, n, k, plan[0], plan[1], device)


def grouped(module: ModuleType, shape: tuple, tile_tokens: int, device: tuple) -> Any:
    plan = answer(module.plan_grouped, shape, tile_tokens, device)
    return (
        plan if isinstance(plan, str) else (plan, answer(module.grouped_needs, shape, plan, device))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", help="the other build: the file _gemm*.so")
    other = load(parser.parse_args().other, "_gemm")
    by_name = isinstance(answer(other.plan, 1, 32, 64, "auto", DEVICES["H200"]), tuple)
    compared = refused = different = 0
    cases: list[tuple[Any, Any, Any]] = []
    for device, m, n, k in itertools.product(DEVICES.values(), TOKENS, DIMENSIONS, DIMENSIONS):
        for path in NUMBERS if k % 16 == 0 else ("auto",):
            ours, theirs = (
                product(b, names, m, n, k, path, device)
                for b, names in ((_gemm, True), (other, by_name))
            )
            cases.append(((m, n, k, path, device), ours, theirs))
    for device, (experts, top_k), pairs, (n, k) in itertools.product(
        DEVICES.values(), EXPERTS, PAIRS, GROUPED
    ):
        for tile_tokens in (0, 8, 16, 32, 64, 128):
            shape = (pairs, experts, min(top_k, pairs), n, k)
            cases.append(
                (
                    (shape, tile_tokens),
                    *(grouped(b, shape, tile_tokens, device) for b in (_gemm, other)),
                )
            )
    for case, ours, theirs in cases:
        compared += 1
        refused += isinstance(ours, str)
        if ours != theirs:
            different += 1
            print(f"{case}: {ours}, the other build {theirs}")
    print(f"{compared} plans, {refused} of them refusals: {different} differ")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
