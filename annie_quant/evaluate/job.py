"""The work of `annie-quant eval`: the evaluation, optionally the layer sensitivity, and their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from annie_quant import files
from annie_quant.errors import EnvironmentFault
from annie_quant.evaluate import helpers, layers
from annie_quant.evaluate.enough_prompts import prompts_per_gate
from annie_quant.evaluate.evaluation import choose_workloads, evaluate_pair, reference_gates
from annie_quant.evaluate.pair import ModelPair
from annie_quant.evaluate.process_group import ProcessGroup, join_group
from annie_quant.judge.not_lost import compares_with_reference
from annie_quant.progress import SILENT, Progress
from annie_quant.schema import DraftAcceptance, EnsembleFigures, Evaluation


def run(
    checkpoint: Path,
    reference: Path,
    *,
    numerics: Sequence[str],
    n: int,
    conversations: Path | None,
    text: Path | None,
    layers_n: int | None,
    output: Path | None,
    progress: Progress,
    rows: int = 128,
    persona: Path | str | None = None,
    workloads: str | None = None,
    processes: int | None = None,
) -> Evaluation:
    """Evaluate a checkpoint and write the result to `output`.

    layers_n: prompts per gate for the layer sensitivity; None: not measured. It is measured under the first numerics, stored
    in the evaluation's `layers` and that numerics' kl.by_layer, and written to OUTPUT.layers.json, from which a killed run
    resumes, and OUTPUT.layers.svg. rows: answers per batch. processes: on this machine, which share the work (helpers.py); None: as
    many as are fastest. Under torchrun its processes share it instead.
    """
    work = partial(
        compute, checkpoint, reference, numerics=numerics, n=n, conversations=conversations, text=text, layers_n=layers_n,
        output=output, rows=rows, persona=persona, workloads=workloads,
    )  # fmt: skip
    group = join_group()
    if output is not None and group.is_first:
        check_writable(output)  # before an hour of evaluation, not after it
    if group.size == 1:
        if processes is None:
            n_answers = sum(c.n_turns for w in choose_workloads(workloads, n, persona) for c in w.cases)
            processes = helpers.automatic([checkpoint, reference], n_answers)
        if processes > 1:
            with helpers.helped_by(work, processes) as group:
                return work(group=group, progress=progress)
    return work(group=group, progress=progress)


def compute(
    checkpoint: Path,
    reference: Path,
    *,
    numerics: Sequence[str],
    n: int,
    conversations: Path | None,
    text: Path | None,
    layers_n: int | None,
    output: Path | None,
    rows: int,
    persona: Path | str | None,
    workloads: str | None,
    group: ProcessGroup,
    progress: Progress = SILENT,
) -> Evaluation:
    """run in one process of the group; the same parameters. The first one writes the files."""
    writes = output is not None and group.is_first
    chosen = choose_workloads(workloads, n, persona)
    with ModelPair(checkpoint, reference, rows=rows, progress=progress, group=group) as pair:
        if compares_with_reference(chosen):
            per_gate = prompts_per_gate(n, reference_gates(pair, chosen))
            chosen = chosen if per_gate == n else choose_workloads(workloads, per_gate, persona)
        result = evaluate_pair(pair, chosen, numerics, conversations, text=text)
        if layers_n is not None and list(result.numerics) != ["bf16"]:
            first = next(iter(result.numerics))
            layers_output = None if output is None else output.with_suffix(".layers.json")
            result.layers = layers.measure(
                pair, choose_workloads(workloads, layers_n, persona), first, output=layers_output
            )
            kl = result.numerics[first].kl
            if kl is not None:
                kl.by_layer = result.layers.by_layer()
            if output is not None and writes:
                layers.plot(result.layers, output.with_suffix(".layers.svg"))
    if output is not None and writes:
        files.write_json(output, result.to_dict())
    return result


def check_writable(path: Path) -> None:
    """Raise EnvironmentFault if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written ({error.strerror}{files.owner(path.parent)})", "choose another --output"
        ) from error


def ensemble_line(result: Evaluation, name: str, figures: EnsembleFigures) -> str:
    """Return how far the arithmetic decides: changed answers, and the gates whose count differs between members."""
    members = {k: m for k, m in result.members.items() if k.startswith(f"{name}+")}
    ranges = []
    for gate, row in result.numerics[name].gates.items():
        passes = [row.passes, *(m.gates[gate].passes for m in members.values() if gate in m.gates)]
        if min(passes) != max(passes):
            ranges.append(f"{gate} {min(passes)}-{max(passes)} of {row.n}")
    changed = ", ".join(f"{k.removeprefix(f'{name}+')} {m.n_changed}" for k, m in members.items())
    return (
        f"{name}: {figures.n_uncertain} of {figures.n} answers uncertain (noise of a margin {figures.noise:.2g}); changed by "
        f"{changed}; {'; '.join(ranges) or 'no gate count depends on the arithmetic'}"
    )


def draft_rates(drafts: Mapping[str, DraftAcceptance], reference: Mapping[str, DraftAcceptance]) -> str:
    """Return accepted of drafted tokens per workload, with the reference's share."""
    parts = []
    for workload, own in drafts.items():
        before = reference.get(workload)
        share = f" (bf16 {before.accepted / before.n:.0%})" if before else ""
        parts.append(f"{workload} {own.accepted} of {own.n}{share}")
    return ", ".join(parts)


def summary_lines(result: Evaluation) -> Iterator[str]:
    """Yield one line of text per numerics and scored text."""
    for name, side in result.numerics.items():
        if kl := side.kl:
            yield (
                f"{name}: KL mean {kl.mean:.4g}, p99 {kl.p99:.3g} over {kl.n_tokens} tokens; {kl.flips} flips"
                f" ({kl.flips_predicted:.0f} predicted from margins); perplexity {kl.perplexity:.3f} (reference"
                f" {kl.perplexity_reference:.3f}); {side.verbosity_ratio or 0:.2f} of the reference's length"
            )
        if figures := result.ensemble.get(name):
            yield ensemble_line(result, name, figures)
        if side.drafts:
            yield f"{name}: drafts of the MTP head accepted: {draft_rates(side.drafts, result.reference_drafts)}"
        if text := side.kl_text:
            yield f"{name}, text: perplexity {text.perplexity:.3f} (reference {text.perplexity_reference:.3f})"
    if result.layers:
        worst = sorted(result.layers.by_layer(), key=lambda row: -row.kl)[:3]
        yield "most divergence: " + ", ".join(f"{row.layer} {row.kl:.3g}" for row in worst)
