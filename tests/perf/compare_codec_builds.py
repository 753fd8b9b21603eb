"""Compare two builds of the codec in one process, with interleaved repeats and minima.

    git worktree add --detach OLD 32580e2
    cd OLD && ANNIE_QUANT_ONLY=_nvfp4 python setup.py -q build_ext --inplace && cd -
    python tests/perf/compare_codec_builds.py OLD/annie_quant/_nvfp4*.so [--variant avx2] [--threads 2] [--rounds 40]
    python tests/perf/compare_codec_builds.py OLD/annie_quant/_nvfp4*.so --in-cache       one thread, 256x1024, ns per 16 weights

Both modules are loaded at once, and each round calls both in turn, so that other work on the machine slows both. Results are
compared before they are timed. bf16 4096x4096; every line: the other build's time, ours, ours / other, and the bytes per second
that ours moves as a share of a non-temporal stream (unpacking to float32, as in bench_codec.py) in the same rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import importlib.util
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant import _nvfp4, nvfp4

MODELOPT, LARGEST = 0, 448.0
AMAX, FOUR_OVER_SIX, SWEEP = 0, 1, 2
KIND_F32, KIND_BF16 = 0, 2


def load(path: str, name: str = "_nvfp4") -> ModuleType:
    """Return the module of another build."""
    loader = importlib.machinery.ExtensionFileLoader(f"other_build.{name}", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Case:
    """The calls of one build, with its own outputs."""

    def __init__(self, module: Any, w: np.ndarray, scale: float) -> None:
        self.module, self.scale, (self.rows, self.columns) = module, scale, w.shape
        self.w = w.reshape(-1).view(np.uint8)
        self.codes, self.block_scale = (
            np.zeros(w.size // 2, np.uint8),
            np.zeros(w.size // 16, np.uint8),
        )
        self.out, self.floats = np.zeros(w.size * 2, np.uint8), np.zeros(w.size * 4, np.uint8)
        self.x = np.random.default_rng(1).standard_normal((4, self.columns), np.float32)

    def pack(self, choice: int = AMAX) -> None:
        self.module.pack(
            self.w,
            KIND_BF16,
            16,
            choice,
            MODELOPT,
            self.scale,
            LARGEST,
            0.0,
            None,
            self.codes,
            self.block_scale,
        )

    def amax_and_pack(self) -> None:
        self.module.amax(self.w, KIND_BF16)
        self.pack()

    def unpack(self) -> None:
        self.module.unpack(self.codes, self.block_scale, KIND_BF16, 16, False, self.scale, self.out)

    def stream(self) -> None:
        self.module.unpack(
            self.codes, self.block_scale, KIND_F32, 16, False, self.scale, self.floats
        )

    def fake_quant(self) -> None:
        self.module.fake_quant(self.w, KIND_BF16, 16, self.scale, self.out)

    def gemv(self, tokens: int) -> None:
        x, y = self.x[:tokens].reshape(-1), np.empty(tokens * self.rows, np.float32)
        self.module.gemv(
            x.view(np.uint8),
            KIND_F32,
            self.columns,
            self.codes,
            self.block_scale,
            16,
            False,
            self.scale,
            y.view(np.uint8),
        )


def interleaved(calls: list[Callable[[], None]], rounds: int) -> list[float]:
    """Return the least seconds of each call; a round makes every call once."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", help="the other build's _nvfp4 module (.so)")
    parser.add_argument("--variant", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--in-cache", action="store_true")
    parser.add_argument("--only", default="", help="names of lines, separated by commas")
    arguments = parser.parse_args()
    rows, columns = (256, 1024) if arguments.in_cache else (arguments.size, arguments.size)
    rounds = 50 * arguments.rounds if arguments.in_cache else arguments.rounds
    w = (
        np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02)
    ).astype(ml_dtypes.bfloat16)
    scale = float(nvfp4.tensor_scale(nvfp4.amax(w)))
    modules = [load(arguments.other), _nvfp4]
    for module in modules:
        module.set_variant(arguments.variant)
        module.set_threads(1 if arguments.in_cache else arguments.threads)
    other, ours = (Case(m, w, scale) for m in modules)
    other_empty, ours_empty = (
        Case(m, w[:0], scale) for m in modules
    )  # a call's cost without weights, and its tables
    packed = w.nbytes // 4 + w.size // 16
    lines: list[tuple[str, Callable[[Case], None], int]] = [
        ("pack, scale given", Case.pack, w.nbytes + packed),
        ("amax + pack", Case.amax_and_pack, 2 * w.nbytes + packed),
        ("unpack to bfloat16", Case.unpack, w.nbytes + packed),
        ("sweep, exact", lambda c: c.pack(SWEEP), w.nbytes + packed),
        ("four-over-six", lambda c: c.pack(FOUR_OVER_SIX), w.nbytes + packed),
        ("fake_quant", Case.fake_quant, 2 * w.nbytes),
        *((f"gemv, {n} rows of x", lambda c, n=n: c.gemv(n), packed) for n in (1, 2, 3, 4)),
    ]
    print(
        f"variant {ours.module.variant()}, {ours.module.threads()} threads, bf16 {rows}x{columns}, minima of {rounds} rounds"
    )
    for name, call, moved in lines:
        if arguments.only and not any(name.startswith(part) for part in arguments.only.split(",")):
            continue
        call(other), call(ours)
        assert (other.codes == ours.codes).all() and (
            other.block_scale == ours.block_scale
        ).all(), name
        assert (other.out == ours.out).all(), name
        cases = [other, ours] + ([other_empty, ours_empty] if arguments.in_cache else [])
        stream, theirs, mine, *empty = interleaved(
            [ours.stream, *(functools.partial(call, c) for c in cases)], rounds
        )
        if empty:
            theirs, mine = (
                (s - e) / (w.size / 16) * 1e9 for s, e in zip((theirs, mine), empty, strict=True)
            )
            print(f"{name:22} other {theirs:6.2f} ns  ours {mine:6.2f} ns  {mine / theirs:5.2f}")
            continue
        share = (moved / mine) / ((w.size * 4 + packed) / stream)
        print(
            f"{name:22} other {theirs * 1e3:7.2f} ms  ours {mine * 1e3:7.2f} ms  {mine / theirs:5.2f}  "
            f"{share:6.1%} of the stream"
        )


if __name__ == "__main__":
    main()
