"""The work of `annie-quant eval`: the evaluation, optionally the layer sensitivity, and their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from annie_quant.core import files
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import DraftAcceptance, EnsembleFigures, Evaluation
from annie_quant.judge import Workload
from annie_quant.judge.sampling import compares_with_reference, prompts_per_gate
from annie_quant.offline import layers, process_group
from annie_quant.offline.evaluation import choose_workloads, evaluate_pair, reference_gates
from annie_quant.offline.pair import ModelPair
from annie_quant.offline.process_group import ProcessGroup, join_group


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to evaluate.

    n: prompts per gate. conversations: rows whose assistant tokens are scored; text: a plain text file that is scored.
    layers_n: prompts per gate for the layer sensitivity; None: not measured. It is measured under the first numerics, stored
    in the evaluation's `layers` and that numerics' kl.by_layer, and written to OUTPUT.layers.json, from which a killed run
    resumes, and OUTPUT.layers.svg. rows: answers per batch. persona, workloads: as for data/resolve.py.
    """

    checkpoint: Path
    reference: Path
    numerics: Sequence[str]
    n: int
    conversations: Path | None = None
    text: Path | None = None
    layers_n: int | None = None
    output: Path | None = None
    rows: int = 128
    persona: Path | str | None = None
    workloads: str | None = None
    faults: Sequence[str] = ()

    def prompts(self, n: int) -> list[Workload]:
        """Return the workloads with n prompts per gate."""
        return choose_workloads(self.workloads, n, self.persona)


def run(settings: Settings, progress: Progress = SILENT, processes: int | None = None) -> Evaluation:
    """Evaluate a checkpoint and write the result to `settings.output`.

    processes: on this machine, which share the work (helpers.py); None: as many as are fastest. Under torchrun its processes share
    it instead.
    """
    group = join_group()
    if settings.output is not None and group.is_first:
        check_writable(settings.output)  # before an hour of evaluation, not after it
    chosen = None
    if group.size == 1:
        if processes is None:
            chosen = settings.prompts(settings.n)
            n_answers = sum(c.n_turns for w in chosen for c in w.cases)
            processes = process_group.automatic([settings.checkpoint, settings.reference], n_answers)
        if processes > 1:
            work = partial(compute, settings)
            with process_group.helped_by(work, processes) as group:
                return work(group=group, progress=progress)
    return compute(settings, group, progress, chosen)


def compute(
    settings: Settings, group: ProcessGroup, progress: Progress = SILENT, chosen: list[Workload] | None = None
) -> Evaluation:
    """Evaluate in one process of the group. The first one writes the files. chosen: settings.prompts(settings.n), if known."""
    n, output = settings.n, settings.output
    writes = output is not None and group.is_first
    chosen = settings.prompts(n) if chosen is None else chosen
    with ModelPair(settings.checkpoint, settings.reference, rows=settings.rows, progress=progress, group=group) as pair:
        if compares_with_reference(chosen):
            per_gate = prompts_per_gate(n, reference_gates(pair, chosen))
            chosen = chosen if per_gate == n else settings.prompts(per_gate)
        result = evaluate_pair(
            pair, chosen, settings.numerics, settings.conversations, text=settings.text, faults=settings.faults, n=n
        )
        if settings.layers_n is not None and list(result.numerics) != ["bf16"]:
            first = next(iter(result.numerics))
            layers_output = None if output is None else output.with_suffix(".layers.json")
            result.layers = layers.measure(pair, settings.prompts(settings.layers_n), first, output=layers_output)
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
        if kl and (decides := kl.decisions):
            yield (
                f"{name}, decisions (call, function, arguments, end): KL mean {decides.mean:.4g}, p99 {decides.p99:.3g} over"
                f" {decides.n_tokens} tokens; {decides.flips} flips"
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
