"""GPTQ of one linear with NVFP4: our C loop, and llm-compressor's function on the same weights and Hessian.

    python tests/perf/bench_gptq.py                       # ours: the C loop by scale rule, best's sweep by order
    PEER_VENV/bin/python tests/perf/bench_gptq.py --peer  # theirs, in an environment with llmcompressor

Seconds from Hessian and weights to rounded weights, including the factorization, and the output error on the inputs relative to
plain rounding with the same amax scales.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

SHAPES = ((4096, 4096), (12288, 4096))


def problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights, inputs, Hessian) with columns of unequal size and correlated, as activations are."""
    generator = torch.Generator().manual_seed(0)
    mixing = (
        torch.randn(columns, 64, generator=generator)
        @ torch.randn(64, columns, generator=generator)
        / 64
    )
    x = torch.randn(2 * columns, columns, generator=generator) @ (torch.eye(columns) + 0.2 * mixing)
    x *= torch.exp(0.5 * torch.randn(columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * 0.02, x, x.T @ x / len(x)


def error(w: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    difference = rounded - w
    return float(((difference @ hessian) * difference).sum())


def ours(w: torch.Tensor, hessian: torch.Tensor, scale: str) -> torch.Tensor:
    from annie_quant import nvfp4
    from annie_quant.quantize.gptq import factor, round_columns

    array = w.numpy()
    tensor_scale = float(nvfp4.tensor_scale(nvfp4.amax(array)))
    _, rounded = round_columns(array, factor(hessian), tensor_scale, scale)
    return torch.from_numpy(rounded)


def swept(w: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return the weights by strategy best's sweep, which runs on the device of its tensors."""
    from annie_quant import nvfp4
    from annie_quant.quantize import gptq

    scale = torch.full((len(w),), float(nvfp4.tensor_scale(float(w.abs().max()))), device=w.device)
    return gptq.sweep(w, hessian, scale).values


def theirs(w: torch.Tensor, hessian: torch.Tensor, damping: float) -> torch.Tensor:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    divisor = generate_gparam(w.min(), w.max())
    blocks = w.view(len(w), -1, args.group_size)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=divisor)
    batch = lambda t: t.unsqueeze(0)  # noqa: E731
    rounded, _, _ = quantize_weight(
        batch(w.clone()),
        batch(hessian.clone()),
        batch(scale),
        batch(zero),
        batch(divisor),
        args,
        percdamp=damping,
    )
    return rounded[0]


def plain(w: torch.Tensor) -> torch.Tensor:
    """Round to nearest with ModelOpt's amax scales, in a few lines of torch."""
    step = w.abs().max() / 2688
    blocks = w.view(len(w), -1, 16)
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * step)).to(
        torch.float8_e4m3fn
    ).float() * step
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = grid[torch.bucketize((blocks / scale).abs(), (grid[1:] + grid[:-1]) / 2)]
    return (torch.copysign(nearest, blocks) * scale).view_as(w)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--shapes",
        default=",".join(f"{r}x{c}" for r, c in SHAPES),
        help="rows x columns, comma-separated",
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for rows, columns in (map(int, shape.split("x")) for shape in arguments.shapes.split(",")):
        w, _, hessian = problem(rows, columns)
        base = error(w, plain(w), hessian)
        forms: tuple[float | str, ...] = (
            (0.01, 0.05) if arguments.peer else ("amax", "sweep", "best")
        )
        for form in forms:
            times = []
            for _ in range(arguments.runs):
                start = time.perf_counter()
                if isinstance(form, float):
                    rounded = theirs(w, hessian, form)
                else:
                    rounded = swept(w, hessian) if form == "best" else ours(w, hessian, form)
                times.append(time.perf_counter() - start)
            relative = error(w, rounded, hessian) / base
            seconds = f"median {np.median(times):.2f}, least {min(times):.2f} s"
            print(
                f"{rows}x{columns} {form}: {seconds}, error {relative:.4f} of plain rounding",
                flush=True,
            )


if __name__ == "__main__":
    main()
