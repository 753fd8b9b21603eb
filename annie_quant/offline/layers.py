"""Which layers a checkpoint's divergence comes from: each quantized alone, and each restored among all the others.

A restored linear computes with the reference's own weights and unrounded activations. Each measurement is one pass over the
reference's answers. Finished measurements are stored, so that a killed run resumes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from annie_quant.checkpoint.shards import model_sha256
from annie_quant.core import files
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.workloads import resolve
from annie_quant.documents import LayerDivergence, Sensitivity, SensitivityKey
from annie_quant.judge import Workload
from annie_quant.offline.divergence import TokenLabels, token_labels
from annie_quant.offline.linears import NVFP4Linear, nvfp4_linears, set_numerics
from annie_quant.offline.loading import numerics_of
from annie_quant.offline.pair import EvaluationJob, ModelPair, StrPath, open_pair
from annie_quant.offline.prompts import ScoredAnswer

LAYER_MODES = ("alone", "restored")


def sensitivity(
    model_dir: StrPath,
    reference_dir: StrPath,
    workloads: Sequence[Workload] | None = None,
    numerics: str | None = None,
    modes: Sequence[str] = LAYER_MODES,
    output: StrPath | None = None,
    cache: StrPath | None = None,
    progress: Progress = SILENT,
    n_per_gate: int | None = None,
    device: str | None = None,
    rows: int | None = None,
) -> JsonObject:
    """Measure KL and flips of the checkpoint as it is, and per layer: quantized alone, and restored among the others.

    The parameters that are not listed are those of evaluate.

    Parameters:
        numerics: default: w4a4 if the checkpoint has input scales, else w4a16.
        modes: "alone", "restored" or both.
        output: a JSON file, written after every measurement and read at the start.
        n_per_gate: number of prompts per gate, drawn from the workloads.

    Returns:
        The Sensitivity document as a dict: {"model", "numerics", "key", "all", "alone": {layer: ...}, "restored": ...},
        each measurement with mean and p99 KL in nats per token, same_top, flips and n_tokens.

    Raises:
        UsageError: the checkpoint has no NVFP4 linears.
    """
    job = EvaluationJob(
        checkpoint=Path(model_dir),
        reference=Path(reference_dir),
        workloads=resolve(None, workloads),
        n_per_gate=n_per_gate,
        cache=None if cache is None else Path(cache),
        device=device,
        rows=rows,
    )
    with open_pair(job, progress) as pair:
        result = measure_layers(pair, numerics, modes, None if output is None else Path(output))
    return msgspec.to_builtins(result)


def measure_layers(
    pair: ModelPair, numerics: str | None, modes: Sequence[str], output: Path | None
) -> Sensitivity:
    """Sensitivity of loaded models over the job's prompts."""
    prompts = pair.job.prompts(pair.job.n_per_gate)
    scored = pair.scored(pair.reference.answer(prompts, pair.progress))
    labels = token_labels(pair.template, scored)
    linears = nvfp4_linears(pair.model)
    if not linears:
        raise UsageError(f"{pair.job.checkpoint} has no NVFP4 linears")
    numerics = numerics or numerics_of(pair.model)[0]
    set_numerics(pair.model, numerics)
    reference_model = pair.reference.engine().model
    originals = {name: reference_model.get_submodule(name).weight for name in linears}
    key = SensitivityKey(
        model_sha256(pair.job.checkpoint),
        pair.reference.files.sha256,
        numerics,
        [len(s.target) for s in scored],
    )
    result = stored_sensitivity(output, key) or Sensitivity(str(pair.job.checkpoint), numerics, key)
    layers = list(dict.fromkeys(sublayer_of(name) for name in linears))
    measurements = list(itertools.product(modes, layers))
    total = 1 + len(measurements)
    pair.progress.update(0, total, "sensitivity: all")
    if result.all is None:
        result.all = measure_divergence(pair, scored, labels)
        store_sensitivity(result, output)
    for index, (mode, layer) in enumerate(measurements, 1):
        pair.progress.update(index, total, f"sensitivity: {mode} {layer}")
        measured = result.alone if mode == "alone" else result.restored
        if layer in measured:
            continue
        restored = {
            name: linear
            for name, linear in linears.items()
            if (sublayer_of(name) == layer) == (mode == "restored")
        }
        with restored_linears(restored, originals):
            measured[layer] = measure_divergence(pair, scored, labels)
        store_sensitivity(result, output)
    return result


def sublayer_of(name: str) -> str:
    """Return the layer of a linear: model.layers.3.mlp.up_proj → layers.3.mlp (attention and MLP are separate)."""
    match = re.search(r"(layers\.\d+\.[^.]+)", name)
    return match.group(1) if match else name


@contextlib.contextmanager
def restored_linears(
    linears: Mapping[str, NVFP4Linear], originals: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Let these linears compute with their original weights and unrounded activations."""
    before = {name: (linear.dense, linear.numerics) for name, linear in linears.items()}
    try:
        for name, linear in linears.items():
            linear.dense = originals[name].detach()
            linear.numerics = "w4a16"
        yield
    finally:
        for name, (dense, numerics) in before.items():
            linears[name].dense = dense
            linears[name].numerics = numerics


def measure_divergence(
    pair: ModelPair, scored: Sequence[ScoredAnswer], labels: TokenLabels
) -> LayerDivergence:
    if not scored:
        raise UsageError(
            "sensitivity needs at least one answer", "give more workloads or a larger n_per_gate"
        )
    kl = pair.compare(scored).summary(labels)
    return LayerDivergence(kl.mean, kl.p99, kl.same_top, kl.flips, kl.n_tokens)


def stored_sensitivity(output: Path | None, key: SensitivityKey) -> Sensitivity | None:
    """Return the measurements of an earlier run on the same models and answers, or None."""
    if output is None:
        return None
    try:
        stored = msgspec.convert(files.read_whole_json(output), Sensitivity)
    except msgspec.ValidationError:
        return None
    return stored if stored.key == key else None


def store_sensitivity(result: Sensitivity, output: Path | None) -> None:
    if output is not None:
        files.write_json(output, msgspec.to_builtins(result))
