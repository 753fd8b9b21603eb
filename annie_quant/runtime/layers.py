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
from annie_quant.errors import UsageError
from annie_quant.judge import Workload
from annie_quant.runtime.engine import Engine, Row
from annie_quant.runtime.evaluate import Reference, working_dtype
from annie_quant.runtime.kl import Tally, compare_logits
from annie_quant.runtime.linear import NVFP4Linear, nvfp4_linears, set_numerics
from annie_quant.runtime.loading import load, numerics_of
from annie_quant.runtime.prompts import CLASSES, Scored, Template
from annie_quant.runtime.reference import fingerprint
from annie_quant.runtime.verification import target_of

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
) -> dict[str, Any]:
    """KL and flips of the checkpoint as it is, and for each layer: quantized alone, and restored among the others.

    numerics: default w4a4 where the checkpoint has input scales, else w4a16. output: a JSON file that is written after
    every measurement and read at the start. Returns {"model", "numerics", "all", "alone": {layer: ...}, "restored": ...}
    with mean KL in nats, p99, same_top, flips and n_tokens each.
    """
    tell = progress or (lambda done, total, text: None)
    dtype = working_dtype([model_dir, reference_dir], "cpu")
    template = Template(reference_dir)
    reference = Reference(Path(reference_dir), template, dtype, "cpu", Path(cache) if cache else None, 128)
    asked = reference.converse(list(workloads) if workloads is not None else judge.load_workloads(), tell)
    scored = [
        Scored(a.workload.name, a.prompt, tuple(target_of(d, template.ends)), a.workload.thinking) for a, d in asked
    ]
    model = load(model_dir, cache="float32" if dtype == "float32" else "bf16", dtype=getattr(torch, dtype))
    linears = nvfp4_linears(model)
    if not linears:
        raise UsageError(f"{model_dir} holds no NVFP4 linears")
    numerics = numerics or numerics_of(model)[0]
    set_numerics(model, numerics)
    originals = {name: reference.engine().model.get_submodule(name).weight for name in linears}
    layers = layer_names(linears)
    key = {"model_sha256": fingerprint(model_dir), "reference_sha256": reference.sha256, "numerics": numerics,
           "answers": [len(s.target) for s in scored]}  # fmt: skip
    found = earlier(output, key) or {"model": str(model_dir), "numerics": numerics, "key": key}
    work = [("all", "", frozenset[str]())]
    for mode in modes:
        own = {
            layer: frozenset(n for n in linears if (layer_of(n) == layer) == (mode == "restored")) for layer in layers
        }
        work += [(mode, layer, own[layer]) for layer in layers]
    engine = Engine(model)
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
        if output is not None:
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
    tally = Tally(CLASSES)
    rows = [Row(s.prompt, s.target) for s in scored]
    for i, ours, theirs in reference.distributions.beside(engine, rows):
        s = scored[i]
        classes = template.classes(s.target, s.thinking)
        tally.add(s.category, classes, compare_logits(theirs, ours, torch.tensor(s.target, device=ours.device)))
    summary = tally.summary()
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
