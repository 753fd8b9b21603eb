"""Which layers a checkpoint's divergence comes from: one quantized alone, and one restored among all the others.

A restored linear computes with the reference's own weights and unrounded activations. Each measurement is one pass over
the reference's answers; finished ones are kept, so a killed run goes on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from annie_quant import files, judge
from annie_quant.errors import UsageError, need
from annie_quant.evaluate.engine import Engine
from annie_quant.evaluate.evaluation import Reference, compare, scored_answers, tally, working_dtype
from annie_quant.evaluate.process_group import device_of, team
from annie_quant.evaluate.prompts import Scored, Template
from annie_quant.evaluate.reference import fingerprint
from annie_quant.hf.loading import load, numerics_of
from annie_quant.hf.nvfp4_linear import NVFP4Linear, nvfp4_linears, set_numerics
from annie_quant.judge import Workload

MODES = ("alone", "restored")


def sensitivity(
    model_dir: str | os.PathLike,
    reference_dir: str | os.PathLike,
    workloads: Sequence[Workload] | None = None,
    numerics: str | None = None,
    modes: Sequence[str] = MODES,
    output: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
    progress: Callable[[float, float | None, str], None] | None = None,
    n_per_gate: int | None = None,
    device: str | None = None,
    rows: int = 128,
) -> dict[str, Any]:
    """KL and flips of the checkpoint as it is, and for each layer: quantized alone, and restored among the others.

    numerics: default w4a4 where the checkpoint has input scales, else w4a16. output: a JSON file that is written after
    every measurement and read at the start. n_per_gate draws that many prompts a gate from the workloads. Returns
    {"model", "numerics", "all", "alone": {layer: ...}, "restored": ...} with
    mean KL in nats, p99, same_top, flips and n_tokens each.
    """
    tell = progress or (lambda done, total, text: None)
    together = team()
    if together.rank:
        tell = lambda done, total, text: None  # noqa: E731  # one process speaks for all
    device = device or device_of(together)
    dtype = working_dtype([model_dir, reference_dir], device)
    template = Template(reference_dir)
    reference = Reference(Path(reference_dir), template, dtype, device, Path(cache) if cache else None, rows, together)
    chosen = list(workloads) if workloads is not None else judge.load_workloads()
    asked = reference.converse(chosen if n_per_gate is None else judge.sample(chosen, n_per_gate), tell)
    scored = scored_answers(template, asked)
    model = load(
        model_dir, cache="float32" if dtype == "float32" else "bf16", dtype=getattr(torch, dtype), device=device
    )
    linears = nvfp4_linears(model)
    if not linears:
        raise UsageError(f"{model_dir} holds no NVFP4 linears")
    numerics = numerics or numerics_of(model)[0]
    set_numerics(model, numerics)
    originals = {name: reference.engine().model.get_submodule(name).weight for name in linears}
    layers = layer_names(linears)
    key = {"model_sha256": fingerprint(model_dir), "reference_sha256": reference.sha256, "numerics": numerics,
           "answers": [len(s.target) for s in scored]}  # fmt: skip
    known_before = together.gather({0: earlier(output, key)} if not together.rank else {})[0]
    found = known_before or {"model": str(model_dir), "numerics": numerics, "key": key}
    work = [("all", "", frozenset[str]())]
    for mode in modes:
        own = {
            layer: frozenset(n for n in linears if (layer_of(n) == layer) == (mode == "restored")) for layer in layers
        }
        work += [(mode, layer, own[layer]) for layer in layers]
    engine = Engine(model, rows=rows, team=together)
    for done, (mode, layer, restored) in enumerate(work):
        tell(done, len(work), f"sensitivity: {mode} {layer}")
        known = found if mode == "all" else found.setdefault(mode, {})
        if (layer or mode) in known:
            continue
        undo = restore(linears, originals, restored)
        try:
            known[layer or mode] = divergence(engine, template, reference, scored)
        finally:
            undo()
        if output is not None and not together.rank:
            files.write_json(output, found)
    return found


def layer_of(name: str) -> str:
    """model.layers.3.mlp.up_proj → layers.3.mlp: attention and MLP of a layer are measured apart."""
    match = re.search(r"(layers\.\d+\.[^.]+)", name)
    return match.group(1) if match else name


def layer_names(linears: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(layer_of(n) for n in linears))


def restore(linears: dict[str, NVFP4Linear], originals: dict[str, Any], which: Iterable[str]) -> Callable[[], None]:
    """Let these linears compute as the reference's; returns what puts them back."""
    before = {name: (linears[name].dense, linears[name].numerics) for name in which}
    for name in before:
        linears[name].dense, linears[name].numerics = originals[name].detach(), "w4a16"

    def undo() -> None:
        for name, (dense, numerics) in before.items():
            linears[name].dense, linears[name].numerics = dense, numerics

    return undo


def divergence(engine: Engine, template: Template, reference: Reference, scored: Sequence[Scored]) -> dict[str, Any]:
    compared = compare(engine, reference, template, scored, lambda *_: None, "")
    summary = tally(template, scored, compared)
    return {name: summary[name] for name in ("mean", "p99", "same_top", "flips", "n_tokens")}


def earlier(output: str | os.PathLike | None, key: dict[str, Any]) -> dict[str, Any] | None:
    """What a run before this one measured of the same models on the same answers."""
    if output is None or not Path(output).is_file():
        return None
    try:
        found = files.read_json(output)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and found.get("key") == key else None


def by_layer(found: dict[str, Any]) -> list[dict[str, Any]]:
    """[{"layer", "kl"}] in the model's order: the mean KL of each layer quantized alone; what a report draws."""
    return [{"layer": layer, "kl": row["mean"]} for layer, row in found.get("alone", {}).items()]


def plot(found: dict[str, Any], path: str | os.PathLike) -> None:
    """Bars a layer: its KL when quantized alone, and what restoring it takes away from the whole (SVG or PNG by name)."""
    need("matplotlib", "plots")
    from matplotlib.figure import Figure

    layers = list(found["alone"])
    figure = Figure(figsize=(8, 1 + 0.22 * len(layers)), layout="constrained")
    axes = figure.subplots()
    at = range(len(layers))
    axes.barh(at, [found["alone"][n]["mean"] for n in layers], 0.4, label="quantized alone")
    if "restored" in found:
        saved = [found["all"]["mean"] - found["restored"][n]["mean"] for n in layers]
        axes.barh([i + 0.4 for i in at], saved, 0.4, label="taken away by restoring it")
    axes.set_yticks([i + 0.2 for i in at], layers, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"mean KL divergence, nats a token ({found['numerics']}; all layers: {found['all']['mean']:.4g})")
    axes.legend()
    figure.savefig(path)
