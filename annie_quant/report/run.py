"""A run directory as the report reads it: the parts that exist, and the command that makes each missing one.

Nothing is judged here: the stored verdict is shown. `annie-quant report DIR --judge` (recheck.py)
makes a new one. Parts that do not fit their type count as missing (documents.salvage). Each line of
records.jsonl that is not a record is left out with a message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from annie_quant import documents
from annie_quant.bench.aggregates import labelled, summaries, timed
from annie_quant.bench.run_folder import valid_records
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.files import ASSETS, read_json
from annie_quant.core.text import visible
from annie_quant.judge import decision, evidence
from annie_quant.judge.gates import tabulate
from annie_quant.judge.pairing import checks_by_prompt
from annie_quant.report.format import name

ARITHMETICS = {"bf16": "reference", "w4a4": "W4A4", "w4a16": "W4A16"}
REFERENCE = "bf16"
SERIES = {
    "bf16": 0,
    "naive": 1,
    "mlp_only": 2,
    "q4_k_m": 3,
}
# Gates of behaviour come first, as in the original plan's tables; other gates follow.
GATE_ORDER = (
    "tool_call",
    "no_markdown",
    "thinking_leak",
    "factual",
    "reasoning",
    "non_empty",
    "abstention",
    "stop",
    "repetition",
)
JUDGE = "annie-quant report DIR --judge"


@dataclass(frozen=True)
class MeasuredSide:
    """A model in one arithmetic without a server (OfflineModel) or behind one server (ServedModel).

    name: the backend, or MODEL/NUMERICS.
    how: "reference", "W4A4", "W4A16" or "served".
    data: as in run.json.
    """

    kind: ClassVar[str]
    model: str
    name: str
    title: str
    how: str
    data: documents.ServedSide | documents.OfflineSide

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def gates(self) -> dict[str, documents.GateResult]:
        return self.data.gates

    def pair(self, gate: str) -> documents.PairedGate | None:
        """Return the counts that decide a gate; None where it was not compared with a reference."""
        pair = self.data.paired.get(gate)
        return None if pair is None or not pair.n or self.gates[gate].advisory else pair

    def shows_nothing(self, gate: str) -> bool:
        """Return whether a gate keeps because neither side passes it once: nothing is lost, and nothing is there."""
        result = self.gates[gate]
        return result.verdict == "pass" and not result.passes

    def word(self, gate: str) -> str:
        """Return a gate's verdict: keeps or loses where it was compared with a reference, else pass or fail; or undecided."""
        result = self.gates[gate]
        if self.pair(gate) is None:
            return result.verdict
        return {"pass": "keeps", "fail": "loses"}.get(result.verdict, "undecided")

    @property
    def deciding(self) -> dict[str, documents.GateResult]:
        """The gates that are not advisory."""
        return {gate: result for gate, result in self.gates.items() if not result.advisory}


@dataclass(frozen=True)
class ServedModel(MeasuredSide):
    kind = "served"
    data: documents.ServedSide


@dataclass(frozen=True)
class OfflineModel(MeasuredSide):
    kind = "offline"
    data: documents.OfflineSide


class RecordedRecipe(msgspec.Struct):
    """The part of a checkpoint's annie_quant.json that pages show.

    calib_data_sha256: None for no data, unset if unknown.
    """

    strategy: str | None = None
    scale: str | None = None
    calib_data_sha256: str | UnsetType | None = UNSET
    calib_samples: int | None = None
    held_out: documents.HeldOut | None = None
    ingredients: list[documents.Ingredient] = []
    calibration: documents.CalibrationUse | None = None
    adapters: list[documents.MergedAdapter] = []


@dataclass
class Missing:
    """A part that the run does not have, and the command that makes it."""

    part: str
    message: str
    command: str


@dataclass
class LoadedRun:
    """A run directory.

    backends: what each server reports about itself, by backend.
    records: of measured and warm-up requests.
    bad_lines: one message per line of records.jsonl that is not a record.
    unlisted: models that a side belongs to and run.json does not list.
    """

    folder: Path
    document: documents.Run
    backends: dict[str, documents.Identity]
    records: list[documents.RequestRecord]
    inputs: list[documents.SentWorkload]
    bad_lines: list[str] = field(default_factory=list)
    sides: list[ServedModel | OfflineModel] = field(default_factory=list)
    unlisted: set[str] = field(default_factory=set)
    missing: list[Missing] = field(default_factory=list)

    @property
    def aggregates(self) -> documents.Aggregates:
        return self.document.aggregates

    @property
    def verdict(self) -> documents.Verdict:
        return self.document.verdict

    @property
    def sentence(self) -> str:
        return visible(self.verdict.sentence).strip()

    @property
    def failed(self) -> int:
        """Measured requests that failed."""
        return sum(bool(r.answer.error) for r in self.measured)

    @property
    def models(self) -> list[documents.ModelRow]:
        return self.document.aggregates.models

    @property
    def measured(self) -> list[documents.RequestRecord]:
        """Requests without the warm-ups."""
        return [r for r in self.records if not r.warmup]

    @property
    def sampled(self) -> set[str]:
        """Workloads whose repeats differ. One that inputs.json does not name counts as greedy, like the shipped ones."""
        return {w.name for w in self.inputs if w.temperature}

    @property
    def greedy(self) -> set[str]:
        """Workloads whose repeats are equal."""
        return {r.workload for r in self.measured} - self.sampled

    @property
    def served(self) -> list[ServedModel]:
        return [s for s in self.sides if isinstance(s, ServedModel)]

    @property
    def offline(self) -> list[OfflineModel]:
        return [s for s in self.sides if isinstance(s, OfflineModel)]

    def sides_of(self, model: str) -> list[ServedModel | OfflineModel]:
        return [s for s in self.sides if s.model == model]

    def model(self, model: str) -> documents.ModelRow:
        return next((m for m in self.models if m.name == model), documents.ModelRow(name=model))

    def is_reference(self, side: MeasuredSide) -> bool:
        """Return whether other sides are compared with this one; what bf16 itself misses was not lost."""
        roles = self.aggregates.roles
        stated = roles.reference if roles else None
        return side.how == "reference" or (side.kind == "served" and side.name == stated)

    def folder_of(self, model: str) -> Path | None:
        """Return the folder of a model's checkpoint; None where it is not known or not there."""
        folders = [self.folder / "models" / model]
        recorded = self.model(model).checkpoint
        if recorded:
            name = Path(recorded).name
            folders = [
                Path(recorded),
                self.folder / recorded,
                self.folder / "models" / name,
                *folders,
            ]
        return next((folder for folder in folders if (folder / "config.json").is_file()), None)

    def label(self, model: str) -> str:
        return self.model(model).label or name(model)

    def series(self, model: str) -> int:
        """Return the colour of a model, from 0 to 7: the same in every chart."""
        if model in SERIES:
            return SERIES[model]
        others = [m.name for m in self.models if m.name not in SERIES]
        return 4 + (others.index(model) % 4 if model in others else 0)

    @property
    def gpu_names(self) -> list[str]:
        return [gpu.get("name", "") for gpu in self.document.environment.gpus]

    @property
    def gate_names(self) -> list[str]:
        """All gates of all sides: deciding ones before advisory ones."""
        advisory: dict[str, bool] = {}
        for side in self.sides:
            for gate, result in side.gates.items():
                advisory.setdefault(gate, result.advisory)
        ranks = {gate: rank for rank, gate in enumerate(GATE_ORDER)}
        return sorted(advisory, key=lambda gate: (advisory[gate], ranks.get(gate, len(ranks))))

    def gate_title(self, gate: str) -> str:
        titles = (side.gates[gate].title for side in self.sides if gate in side.gates)
        return next((t for t in titles if t), name(gate))

    @property
    def workloads(self) -> list[str]:
        names = dict.fromkeys(workload for s in self.served for workload in s.data.workloads)
        return list(names)

    @property
    def candidate(self) -> ServedModel | None:
        """The verdict's candidate as it was served."""
        return self._served_as(self.verdict.candidate)

    @property
    def incumbent(self) -> ServedModel | None:
        """The side that the candidate would replace, as it was served."""
        return self._served_as(self.verdict.incumbent)

    @cached_property
    def evaluations(self) -> dict[str, documents.Evaluation]:
        """The evaluations in eval/ of the run's offline models, as far as they can be read."""
        evaluations = {}
        for model in self.aggregates.offline:
            path = self.folder / f"eval/{model}.json"
            if Path(model).name == model and path.is_file():
                with contextlib.suppress(AnnieError):
                    evaluations[model] = documents.Evaluation.load(path)
        return evaluations

    @cached_property
    def evidence(self) -> dict[str, list[str]]:
        """By model, the figures that its stored outcomes do not give (judge/evidence.py); models without any are left out."""
        lines = {}
        for model, evaluation in self.evaluations.items():
            shown = {**self.aggregates.offline[model], **self.aggregates.members.get(model, {})}
            lines[model] = evidence.differences(evaluation, shown)
        return {model: differences for model, differences in lines.items() if differences}

    def _served_as(self, model: str | None) -> ServedModel | None:
        backend = decision.served_as(self.aggregates, model) if model else None
        return next((s for s in self.served if s.name == backend), None)


# The parts of other documents that the report shows.


class _Evaluation(msgspec.Struct):
    verdict: documents.PairedVerdict | None = None
    numerics: dict[str, documents.OfflineSide] = {}
    members: dict[str, documents.OfflineSide] = {}
    reference_gates: dict[str, documents.GateResult] = {}
    blocking: list[str] = []


class _LayerDivergence(msgspec.Struct):
    mean: float


class _Sensitivity(msgspec.Struct):
    numerics: str = ""
    alone: dict[str, _LayerDivergence] = {}


class _Inputs(msgspec.Struct):
    workloads: list[documents.SentWorkload] = []


class _Tried(msgspec.Struct):
    strategy: str
    verdict: documents.PairedVerdict | None = None


class _Search(msgspec.Struct):
    chosen: str | None = None
    strategies: list[_Tried] = []


def load(run_dir: str | os.PathLike) -> LoadedRun:
    """Read a run directory.

    Raises UsageError where it holds nothing that a report could show, EnvironmentFault for a run of
        a newer version.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such run directory", "annie-quant demo makes one in runs/demo"
        )
    records, bad_lines = _records(folder / "records.jsonl")
    records = [*valid_records(records), *_records(folder / "unanswered.jsonl")[0]]
    source = next((n for n in ("run.json", "bench.json") if (folder / n).is_file()), None)
    evaluations = {
        p.stem: documents.salvage_or_default(_Evaluation, p)
        for p in sorted(folder.glob("eval/*.json"))
    }
    if source is None and not records and not evaluations:
        raise UsageError(
            f"{folder}: neither run.json, bench.json, records.jsonl nor eval/*.json is there",
            "give a folder that annie-quant demo or bench wrote",
        )
    document = documents.Run()
    try:
        if source:
            document = documents.salvage(documents.Run, folder / source) or document
    except ValueError as error:
        raise UsageError(
            f"{folder / str(source)}: not JSON ({error})", "run the command that wrote it again"
        ) from error
    bench = documents.salvage_or_default(documents.Bench, folder / "bench.json")
    inputs = documents.salvage_or_default(_Inputs, folder / "inputs.json")
    search = documents.salvage_or_default(_Search, folder / "search.json")
    run = LoadedRun(
        folder,
        document,
        bench.backends,
        records,
        inputs.workloads,
        bad_lines,
    )
    tried = {row.strategy for row in search.strategies}
    if tried:  # not its smoke tests, early looks and further draws
        evaluations = {
            name: evaluation for name, evaluation in evaluations.items() if name in tried
        }
    run.verdict.candidate = run.verdict.candidate or search.chosen
    if not run.aggregates.served and records:  # a benchmark that was cut off
        run.aggregates.served = _served_from_records(run)
    stored = {name: evaluation.verdict for name, evaluation in evaluations.items()}
    stored |= {row.strategy: row.verdict for row in search.strategies if row.verdict is not None}
    _show_verdict(run, _add_evaluations(run, evaluations), stored, search.chosen if tried else None)
    _add_models(run)
    _add_sides(run)
    run.missing = _missing(run, source)
    return run


def _records(path: Path) -> tuple[list[documents.RequestRecord], list[str]]:
    """Return (records, one message per line that is not a record)."""
    records = []
    bad_lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
        if line.strip():
            try:
                records.append(documents.salvage_record(line))
            except (ValueError, RecursionError) as error:
                bad_lines.append(f"line {number}: {error}"[:200])
    return records, bad_lines


def _served_from_records(run: LoadedRun) -> dict[str, documents.ServedSide]:
    """Return what records alone give of each backend: gates and percentiles."""
    sides = {}
    fit = timed(run.measured)
    for backend in dict.fromkeys(r.backend for r in run.measured):
        checks = checks_by_prompt([r for r in run.measured if r.backend == backend], run.greedy)
        by_label = labelled(r for r in fit if r.backend == backend)
        sides[backend] = documents.ServedSide(
            gates=tabulate(checks.values()),
            workloads={w: summaries(rows) for w, rows in by_label.items()},
        )
    return sides


def _show_verdict(
    run: LoadedRun,
    added: Collection[str | None],
    stored: Mapping[str, documents.PairedVerdict | None],
    chosen: str | None,
) -> None:
    """Show the verdict of a search's choice, or of the only evaluation, where run.json has none.

    A verdict that does not cover an evaluation that was added later is withdrawn.

    added: models with such an evaluation.
    stored: the verdicts of evaluations by model.
    chosen: the search's choice.
    """
    verdict = run.verdict
    candidate = verdict.candidate
    if not verdict.sentence:
        model = chosen
        if model is None and len(stored) == 1 and not run.aggregates.served:
            model = next(iter(stored))
        offline = stored.get(model) if model is not None else None
        if model is not None and offline is not None:
            loses = offline.verdict in decision.FAILING or model in run.aggregates.blocking
            run.document.verdict = documents.Verdict(
                sentence=f"{model}: {offline.sentence}",
                passed=not loses,
                outcome=offline.verdict,
                badge=offline.verdict,
                head=offline.head,
                candidate=model,
                reasons=offline.reasons,
            )
        return
    backend = decision.served_as(run.aggregates, candidate) if candidate else None
    model = run.aggregates.served[backend].model if backend else candidate
    later = {candidate, model} & set(added) - {None}
    if later:
        name = f"eval/{next(iter(later))}.json"
        run.document.verdict = documents.Verdict(
            sentence=f"{name} was added after the verdict, which does not cover it: {JUDGE}",
            outcome="undecided",
            head=[f"Next: judge again, {JUDGE}."],
            badge="undecided",
            candidate=candidate,
            incumbent=verdict.incumbent,
            caveats=verdict.caveats,
        )
    elif verdict.rule < decision.RULE:
        caveat = f"the verdict was made by an older rule; today's rule: {JUDGE}"
        verdict.caveats = [*verdict.caveats, caveat]


def _add_evaluations(run: LoadedRun, evaluations: dict[str, _Evaluation]) -> set[str | None]:
    """Add eval/<model>.json where run.json lacks it, and sensitivity/<model>.json's divergence by layer.

    Return the models of which run.json has no evaluation, or fewer arithmetics.
    """
    added: set[str | None] = set()
    offline = run.aggregates.offline
    members = run.aggregates.members
    for model, evaluation in evaluations.items():
        if evaluation.blocking:
            run.aggregates.blocking[model] = evaluation.blocking
        if evaluation.numerics.keys() - offline.get(model, {}).keys():
            added.add(model)
        offline[model] = evaluation.numerics | offline.get(model, {})
        members[model] = evaluation.members | members.get(model, {})
        if evaluation.reference_gates:
            offline.setdefault(REFERENCE, {}).setdefault(
                REFERENCE, documents.OfflineSide(gates=evaluation.reference_gates)
            )
    for path in sorted(run.folder.glob("sensitivity/*.json")):
        sensitivity = documents.salvage_or_default(_Sensitivity, path)
        side = offline.get(path.stem, {}).get(sensitivity.numerics)
        if side and side.kl:
            side.kl.by_layer = [
                documents.LayerKL(layer, row.mean) for layer, row in sensitivity.alone.items()
            ]
    return added


def _add_models(run: LoadedRun) -> None:
    """Give every side a model with a label. A server's name for its model is used only where that model is known."""
    known = {m.name: m for m in run.models}
    for backend, data in run.aggregates.served.items():
        if data.model not in known and data.model not in run.aggregates.offline:
            data.model = backend
    for model in [
        *run.aggregates.offline,
        *(str(data.model) for data in run.aggregates.served.values()),
    ]:
        if model not in known:
            known[model] = documents.ModelRow(name=model)
            run.unlisted.add(model)
    for row in known.values():
        row.label = row.label or name(row.name)
    run.aggregates.models = list(known.values())


def _add_sides(run: LoadedRun) -> None:
    order = {numerics: index for index, numerics in enumerate(ARITHMETICS)}
    for row in run.models:
        model = row.name
        offline = run.aggregates.offline.get(model, {})
        for numerics in sorted(offline, key=lambda name: order.get(name, len(order))):
            how = ARITHMETICS.get(numerics, numerics)
            title = f"{how} offline"
            name = f"{model}/{numerics}"
            run.sides.append(
                OfflineModel(
                    model,
                    name,
                    title,
                    how,
                    offline[numerics],
                )
            )
        for backend, data in run.aggregates.served.items():
            if data.model == model:
                title = f"{data.runtime or 'server'} served"
                run.sides.append(
                    ServedModel(
                        model,
                        backend,
                        title,
                        "served",
                        data,
                    )
                )


def _missing(run: LoadedRun, source: str | None) -> list[Missing]:
    served = run.served
    offline = run.offline
    there: dict[str, object] = {
        "verdict": source,
        "sizes": len(run.models) > len(run.unlisted),
        "offline": offline,
        "kl": not offline or any(s.data.kl for s in offline),
        "served": served,
        "records": run.records,
        "memory": not served or any(s.data.memory_bytes for s in served),
        "comparisons": not served or run.aggregates.comparisons,
    }
    rows = []
    for part, texts in read_json(ASSETS / "missing_parts.json").items():
        if not there[part]:
            message = texts["message"].format(run=run.folder.name)
            command = JUDGE if part == "verdict" and offline else texts["command"]
            rows.append(Missing(part, message, command))
    return rows
