"""Round the head to NVFP4 by GPTQ over the answers' tokens: the only positions whose logits are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import HEAD, weight_name
from annie_quant.core.progress import Progress
from annie_quant.offline.engine import Row
from annie_quant.quantize.formats import GROUP
from annie_quant.quantize.hessian import FactorError, Hessian, factor, round_columns
from annie_quant.quantize.kl_trial import Trial
from annie_quant.quantize.layer_rounder import LayerResult


def round_head(
    trial: Trial, rows: Sequence[Row], damping: float, scale: nvfp4.Scale, file: Path, progress: Progress
) -> nvfp4.Tensor:
    """Return the head in NVFP4.

    rows: prompts and answers whose hidden states are its inputs.
    file: with the result of an interrupted run, or written.
    """
    if file.is_file():
        return LayerResult.load(file).packed[HEAD]
    head = trial.linear(HEAD)
    hessian = Hessian(torch.ones(1, device=head.weight.device), fast=head.weight.is_cuda)

    def observe(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        hessian(x, torch.zeros(len(x), dtype=torch.long, device=x.device))

    handle = head.register_forward_pre_hook(observe)
    try:
        for done, _ in enumerate(trial.engine.scores(rows), 1):
            progress.update(done, len(rows), f"head: inputs of {done} of {len(rows)} answers")
    finally:
        handle.remove()
    name = weight_name(trial.folder, HEAD)
    top = max(float(nvfp4.amax(piece)) for piece in trial.folder.rows(name))
    tensor_scale = float(nvfp4.tensor_scale(top, scale=scale))
    try:
        mean = hessian.mean()
        solution = None if mean is None else factor(mean, damping)
    except FactorError:
        solution = None
    parts = [
        nvfp4.pack(piece, tensor_scale=tensor_scale, scale=scale, group=GROUP)
        if solution is None
        else round_columns(piece, solution, tensor_scale, scale)[0]
        for piece in trial.folder.rows(name)
    ]
    codes, scales = (np.concatenate([getattr(p, field) for p in parts]) for field in ("codes", "block_scale"))
    packed = nvfp4.Tensor(codes, scales, parts[0].tensor_scale, (len(codes), codes.shape[1] * 2), GROUP)
    LayerResult({HEAD: packed}).save(file)
    return packed
