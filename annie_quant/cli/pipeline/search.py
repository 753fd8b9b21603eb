"""The steps of a search: from the fewest bytes per token up; the first that keeps every gate that bf16 has is chosen.

Tried is `best`, also under budgets of bytes (best@1.5: at most 1.5 GB of weights per token), whose measurements are shared. With
--all every strategy is tried, with --strategies only those, in their order.

    bf16 is the fine-tune? → quantize → audit → smoke test → early look → all prompts → chosen, or explained and the next one

The output is a run directory: a finished step is not done again. search.json and search.md have everything that was tried.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from annie_quant import __version__, documents, judge
from annie_quant.checkpoint import ModelFolder, decode_speed, first_token
from annie_quant.checkpoint.shards import model_sha256
from annie_quant.checkpoint.size import folder_size
from annie_quant.cli.pipeline import SearchSettings, search_text
from annie_quant.cli.pipeline import search_diagnosis as diagnosis
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.cli.pipeline.stages import (
    AuditResult,
    NamedStrategy,
    Stages,
    drawn,
    file_name,
    offline_prompts,
)
from annie_quant.core import host
from annie_quant.core.errors import AnnieError, DiskFull, UsageError
from annie_quant.core.files import write_json, write_text
from annie_quant.core.progress import Console
from annie_quant.data import behaviours, check_prompt_hash
from annie_quant.data.workloads import resolve
from annie_quant.judge import Workload, decision
from annie_quant.judge.decision import wording
from annie_quant.judge.gates import GATES, REFERENCE_GATES, decides
from annie_quant.judge.sampling import answers_per_gate, compares_with_reference
from annie_quant.quantize.estimates import strategy_read_bytes
from annie_quant.quantize.mixed_formats import budgets
from annie_quant.quantize.strategies import by_rank, find

KL_CONVERSATIONS = 60
MAX_REASONS = 3  # in one line


def run(settings: SearchSettings, console: Console) -> documents.SearchResult:
    """Try strategies in the run directory, and return everything that was tried.

    Raises UsageError for a stale system prompt in the calibration data, unless allow_prompt_mismatch.
    """
    prompt_of(settings)
    directory = RunDirectory(settings.output)
    stale = check_prompt_hash(
        settings.calib_data, settings.persona, allow=settings.allow_prompt_mismatch
    )
    workloads = resolve(settings.persona, settings.workloads)
    order, notes = order_of(settings)
    notes += mixture_notes(settings, workloads)
    with directory.locked():
        work = directory / "models/.work"
        stages = Stages(
            directory,
            settings.model,
            settings.calib_data,
            settings.samples,
            console,
            work,
            settings.calib_tokens,
            settings.answers,
            best_options(settings),
        )
        search = Search(stages, settings, order, workloads)
        search.result.notes += [*notes, *([stale] if stale else [])]
        search.check_reference()
        if not search.result.stopped:
            search.try_strategies()
        search.save()
        shutil.rmtree(work, ignore_errors=True)
    return search.result


def plan(settings: SearchSettings, console: Console) -> list[str]:
    """Return the time and memory that a search would take, as lines; nothing is written."""
    from annie_quant.cli.pipeline import search_plan

    prompt_of(settings)
    order, notes = order_of(settings)
    workloads = resolve(settings.persona, settings.workloads)
    notes += mixture_notes(settings, workloads)
    with console.task("estimate") as progress:
        return [*notes, *search_plan.dry_run(settings, order, workloads, progress)]


def prompt_of(settings: SearchSettings) -> first_token.Prompt:
    """Return the prompt whose time to the first token is predicted. Raises UsageError for one that the model cannot take."""
    prompt = first_token.Prompt(settings.prompt_tokens, settings.cached_tokens)
    return prompt if prompt == first_token.Prompt() else prompt.within(ModelFolder(settings.model))


def best_options(settings: SearchSettings) -> dict[str, object]:
    """Return the options by which `best` keeps the limits of a search."""
    if settings.max_ttft_ms is None:
        return {}
    return {
        "max_ttft_ms": settings.max_ttft_ms,
        "prompt_tokens": settings.prompt_tokens or 0,
        "cached_tokens": settings.cached_tokens,
        "device": "gb10",
    }


def mixture_notes(settings: SearchSettings, workloads: Sequence[Workload]) -> list[str]:
    """Return what the gates test and the calibration data lack, with the command that adds it."""
    compared = behaviours.compare(settings.calib_data, settings.persona, workloads)
    return behaviours.notes_on(compared, settings.calib_data)


def order_of(settings: SearchSettings) -> tuple[list[str], list[str]]:
    """Return the strategies in the order in which they are tried, and notes on what is not tried."""
    if settings.strategies is None:
        return frontier_order(settings.model, settings.every)
    return chosen_order(settings.strategies), []


def chosen_order(strategies: Sequence[str]) -> list[str]:
    """Return the strategies that the user chose. Raises UsageError for an unknown one, or for a budget that it cannot have."""
    files = dict[str, str]()
    for name in strategies:
        find(NamedStrategy.of(name).name)
        same = files.setdefault(file_name(name), name)
        if same != name:
            raise UsageError(f"{same} and {name} have one folder", "search one of them at a time")
    return list(strategies)


def frontier_order(model: Path, every: bool) -> tuple[list[str], list[str]]:
    """Return `best` and its budgets by predicted bytes per token, and notes on what is not tried.

    every: the other strategies of this package, too. Of equal bytes the cheapest to make is first.
    """
    folder = ModelFolder(model)
    notes = list[str]()
    points = [(strategy_read_bytes(folder, s), s.name) for s in by_rank() if not s.external]
    try:
        under = [(read, f"best@{read / 1e9:.4g}") for read in map(rounded_up, budgets(model))]
    except AnnieError as error:
        notes.append(f"best under budgets is not tried: {error.message}")
    else:  # at the same bytes `best` is not worse than they are by more than the noise (tests/perf/quantize_peers.md)
        points = [point for point in points if every or point[1] == "best"] + under
    return [name for _, name in sorted(points, key=lambda point: point[0])], notes


def rounded_up(read: float) -> float:
    """Return bytes rounded up to four digits of GB: a budget that its name has in full."""
    unit = 10.0 ** (math.floor(math.log10(read)) - 3)
    return math.ceil(read / unit) * unit


class Search:
    """One search; `result` is what search.json holds."""

    def __init__(
        self,
        stages: Stages,
        settings: SearchSettings,
        order: Sequence[str],
        workloads: Sequence[Workload],
    ) -> None:
        self.stages = stages
        self.settings = settings
        self.order = order
        self.workloads = workloads
        self.prompts = offline_prompts(settings.n, workloads)
        self.counts = answers_per_gate(self.prompts)
        self.result = documents.SearchResult(
            chosen=None,
            stopped=None,
            required=list(settings.required),
            command=shlex.join(["annie-quant", *sys.argv[1:]]),
            where=where(settings.n),
            n=settings.n,
            notes=[],
            reference={},
            strategies=[],
            seconds=0.0,
            seeds=settings.seeds,
            version=__version__,
        )

    def check_reference(self) -> None:
        """Evaluate the bf16 model's own gates, which stops the search where they show that it is not the fine-tune."""
        result = self.result
        self.prompts = self.stages.prompts(self.settings.n, self.workloads)
        self.counts = answers_per_gate(self.prompts)
        evaluation = self.stages.evaluate("bf16", self.stages.model, self.prompts)
        result.reference = evaluation.reference_gates
        result.notes += too_few_prompts(result.reference)
        if compares_with_reference(
            self.prompts
        ):  # bf16's own answers are the reference: it cannot fail them
            result.notes += evaluation.notes
        else:
            report = diagnosis.reference_report(result.reference)
            result.notes += [report] if report else []
            if report and report.startswith(diagnosis.WRONG_MODEL) and not self.settings.anyway:
                result.stopped = report
        for note in result.notes:
            self.stages.console.note(note)

    def try_strategies(self) -> None:
        waiting = list(self.order)
        while waiting:
            row = self.attempt(waiting.pop(0))
            self.result.strategies.append(row)
            self.stages.console.note(f"{row.strategy}: {row.outcome}")
            if row.passed and self.result.chosen is None:
                self.result.chosen = row.strategy
                self.result.seconds = self.spent_s()
            self.save()
            if row.passed and not self.settings.every:
                return
            if row.incoherent:  # R46: the quantization is too aggressive
                waiting.sort(key=lambda name: not find(NamedStrategy.of(name).name).conservative)
        if self.result.chosen is None:
            self.result.seconds = self.spent_s()

    def spent_s(self) -> float:
        """Return the seconds of all stages so far, including those of earlier, interrupted runs."""
        return round(sum(row.seconds or 0.0 for row in self.stages.rows), 1)

    def attempt(self, strategy: str) -> documents.StrategyRow:
        """Try one strategy, and return its row of the table."""
        stages = self.stages
        before_s = self.spent_s()
        row = documents.StrategyRow(
            strategy, passed=False, outcome="", why=[], path=[], numerics={}
        )
        audit, fault = quantize_and_audit(stages, strategy)
        if audit is None:
            row.error = fault
            row.outcome = "could not be made"
            row.path = [f"quantize → {fault}"]
            return row
        self.measure_size(row)
        same = next(
            (r for r in self.result.strategies if r.model_sha256 == row.model_sha256 != ""), None
        )
        if same:
            path = [f"quantize → the same checkpoint as {same.strategy}: {same.outcome}"]
            return msgspec.structs.replace(
                same, strategy=strategy, path=path, seconds=round(self.spent_s() - before_s, 1)
            )
        row.audit = audit.summary
        row.loads = audit.loads
        slow = self.too_slow(row)
        if slow:
            row.outcome = "too slow"
            row.why = [slow]
            row.path.append(slow)
        if fault:
            row.outcome = "unsound checkpoint"
            row.why = [fault]
            row.path.append(f"audit → {fault}")
        elif not slow or self.settings.every:
            self.evaluate(row)
        if slow and row.passed:
            row.passed = False
            row.outcome = "too slow"
            row.why = [slow]
        row.seconds = round(self.spent_s() - before_s, 1)
        return row

    def measure_size(self, row: documents.StrategyRow) -> None:
        shards = ModelFolder(self.stages.checkpoint(row.strategy))
        row.model_sha256 = model_sha256(shards.path)
        size = folder_size(shards)
        row.size_bytes = size.size_bytes
        row.bits_per_weight = size.bits_per_weight
        gb10 = decode_speed.DEVICES["gb10"]
        speed = decode_speed.predict(shards, gb10)
        row.read_bytes = speed.read_bytes
        row.predicted_tok_s = speed.tok_s
        prompt = prompt_of(self.settings)
        row.predicted_first_token = first_token.predict_folder(shards, device=gb10, prompt=prompt)

    def too_slow(self, row: documents.StrategyRow) -> str:
        """Return that a checkpoint's first token comes later than the search allows; "" where it does not."""
        limit = self.settings.max_ttft_ms
        if limit is None:
            return ""
        predicted = row.predicted_first_token
        if predicted is None:
            return "no time to the first token is predicted for its formats"
        if predicted.ms <= limit:
            return ""
        return f"first token after {predicted.ms:,.0f} ms as predicted, at most {limit:,.0f}"

    def evaluate(self, row: documents.StrategyRow) -> None:
        """Run the smoke test, the early look and all prompts; sets numerics, why, path, outcome and passed."""
        every = self.settings.every
        self.ask_smoke_question(row)
        if row.incoherent and not every:
            return
        missing = decision.missing_numerics(row.numerics, self.settings.required)
        if missing and not every:
            row.outcome = missing[0]
            row.why = missing
            row.path.append(f"servers → {'; '.join(missing)}")
            return
        if every or not self.is_dropped_early(row):
            self.ask_all_prompts(row)

    def ask_smoke_question(self, row: documents.StrategyRow) -> None:
        """Mark the row as incoherent where the checkpoint loses what bf16 answers to the smoke question."""
        folder = self.stages.checkpoint(row.strategy)
        first = self.stages.evaluate(f"{row.strategy}-smoke", folder, smoke(self.workloads))
        keep_numerics(row, first)
        losses = []
        for kind, side in first.numerics.items():
            gates = [
                gate for gate, pair in side.paired.items() if pair.lost and is_right_or_wrong(gate)
            ]
            if gates:
                losses.append(f"{kind.upper()} {', '.join(gates)}")
        if not losses:
            row.path.append("smoke → coherent")
            return
        lost = "; ".join(losses)
        row.outcome = "gibberish"
        row.why = [f"the smoke question fails: {lost}"]
        row.incoherent = True
        row.path.append(f"smoke → {lost}; bf16 answers it, so the quantization is too aggressive")

    def is_dropped_early(self, row: documents.StrategyRow) -> bool:
        """Return whether a part of the prompts shows that the checkpoint cannot keep every gate."""
        folder = self.stages.checkpoint(row.strategy)
        looks = decision.looks(self.settings.n)
        for look in looks[:-1]:
            prompts = judge.sample(self.prompts, look)
            early = self.stages.evaluate(f"{row.strategy}-n{look}", folder, prompts)
            keep_numerics(row, early)
            row.why = decision.early_reasons(row.numerics, self.counts, len(looks))
            if row.why:
                row.outcome = f"dropped at n = {look}"
                row.path.append(f"gates at n = {look} → dropped: {first_reasons(row.why)}")
                self.explain(row)
                return True
            row.path.append(f"gates at n = {look} → still open")
        return False

    def ask_all_prompts(self, row: documents.StrategyRow) -> None:
        settings = self.settings
        failed_smoke = row.why if row.incoherent else []
        folder = self.stages.checkpoint(row.strategy)
        final = self.stages.evaluate(
            row.strategy, folder, self.prompts, n_conversations=KL_CONVERSATIONS, ensemble=True
        )
        keep_numerics(row, final)
        assert final.verdict is not None  # Stages.evaluate sets it
        lost = decision.final_reasons(final.verdict, row.numerics, settings.required)
        row.why = [*failed_smoke, *lost]
        row.passed = not row.why
        reasons = first_reasons(row.why) or "keeps every gate"
        row.path.append(f"gates at n = {settings.n} → {reasons}")
        if row.passed or settings.every:
            try_draws(self.stages, row, self.prompts, settings.seeds)
        if row.passed:
            row.path.append("PASS: ship it")
            draws = f" in {1 + len(row.draws)} calibration draws" if row.draws else ""
            row.outcome = f"keeps every gate{draws}"
            return
        if not row.incoherent:
            row.outcome = row.why[0] if len(row.why) == 1 else standing(row)
        self.explain(row)

    def explain(self, row: documents.StrategyRow) -> None:
        """Set what is known about why the row's strategy failed."""
        tables = diagnosis.lost_gates(row)
        activations = diagnosis.by_activations(tables)
        row.explained = [activations] if activations else []
        row.hardened = diagnosis.hardened(self.stages, row.strategy, self.workloads, tables)
        if row.hardened is None:
            return
        for gate, result in row.hardened.gates.items():
            counts = (result.before, result.after, result.reference)
            before, after, reference = (f"{passes}/{n}" for passes, n in counts)
            row.explained.append(
                f"hardened prompt, {gate}: before {before}, after {after}, "
                f"reference {reference} (bf16 under it)"
            )
        row.explained.append(row.hardened.reading)

    def save(self) -> None:
        """Write search.json and search.md; called after every strategy."""
        write_json(self.stages.dir / "search.json", msgspec.to_builtins(self.result))
        write_text(self.stages.dir / "search.md", search_text.page(self.result))


def first_reasons(reasons: Sequence[str]) -> str:
    """Return the first reasons and the number of the others, which search.md lists."""
    more = len(reasons) - MAX_REASONS
    shown = list(reasons[:MAX_REASONS])
    if more > 0:
        shown.append(f"{more} more reasons")
    return "; ".join(shown)


def too_few_prompts(reference: documents.GateTable) -> list[str]:
    """Return a note where even a checkpoint that changes no answer would stay undecided; [] where one can keep."""
    counts = {
        gate: documents.PairedGate(row.n, 0, 0)
        for gate, row in reference.items()
        if decides(gate) and row.n and not row.advisory
    }
    judged, _ = decision.judge_gates({"all": counts})
    short = [gate for gate, row in judged["all"].items() if row.verdict == "undecided"]
    if not short:
        return []
    named = ", ".join(
        f"{wording.title(gate)} (n = {counts[gate].n})" for gate in short[:MAX_REASONS]
    )
    others = f" and {len(short) - MAX_REASONS} more" if len(short) > MAX_REASONS else ""
    return [
        f"TOO FEW PROMPTS: without one changed answer {named}{others} would stay undecided, so no strategy "
        "can be chosen; give more logs, or init --fill"
    ]


def is_right_or_wrong(gate: str) -> bool:
    """Return whether a gate decides by labels or rules, and not by a change against bf16."""
    return decides(gate) and gate not in REFERENCE_GATES and not GATES[gate].two_sided


def quantize_and_audit(
    stages: Stages, strategy: str, draw: int = 0
) -> tuple[AuditResult | None, str]:
    """Return the audit of a strategy's checkpoint and what is wrong with it; None and the reason where it cannot be made."""
    try:
        stages.quantize(strategy, draw)
        audit = stages.audit(strategy, draw)
    except DiskFull:
        raise
    except AnnieError as error:
        return None, error.message
    return audit, "" if audit.ok else audit.summary


def try_draws(
    stages: Stages, row: documents.StrategyRow, prompts: Sequence[Workload], seeds: int
) -> None:
    """Make and evaluate a strategy again from `seeds` - 1 further draws of calibration rows. It passes if it keeps in each."""
    for seed in range(1, seeds):
        audit, fault = quantize_and_audit(stages, row.strategy, seed)
        if fault:
            made = "" if audit else " could not be made"
            row.passed = False
            row.why = [*row.why, f"calibration draw {seed}{made}: {fault}"]
            return
        folder = stages.checkpoint(row.strategy, seed)
        evaluation = stages.evaluate(drawn(row.strategy, seed), folder, prompts, ensemble=True)
        verdict = evaluation.verdict or documents.PairedVerdict()
        gates = {}
        for kind, side in evaluation.numerics.items():
            rows = side.gates.items()
            gates[kind] = {gate: [r.passes, r.n] for gate, r in rows if not r.advisory}
        row.draws.append(documents.CalibrationDraw(seed, verdict, gates))
        row.path.append(f"calibration draw {seed} → {verdict.sentence}")
        if verdict.verdict != "keeps":
            row.passed = False
            row.why = [*row.why, f"calibration draw {seed}: {verdict.sentence}"]


def where(n: int) -> str:
    """Return a line with the number of prompts, the date and the machine."""
    machine = host.environment()
    gpu = machine.gpus[0]["name"] if machine.gpus else "no GPU"
    return f"n = {n} prompts per gate, {machine.time[:10]}, {machine.machine}, {machine.cores} cores, {gpu}."


def keep_numerics(row: documents.StrategyRow, evaluation: documents.Evaluation) -> None:
    """Set the row's numerics to the part of an evaluation that search.json keeps."""
    row.verdict = evaluation.verdict
    row.numerics = {
        kind: msgspec.convert(side, documents.SearchNumerics, from_attributes=True)
        for kind, side in evaluation.numerics.items()
    }


def standing(row: documents.StrategyRow) -> str:
    """Return the row's verdict with the number of gates that it is about."""
    if row.verdict is None:
        return f"not accepted: {len(row.why)} reasons"
    members = row.verdict.members.values()
    lost = {g for m in members for g in m.loses}
    undecided = {g for m in members for g in m.undecided}
    if not lost and undecided:
        return f"undecided: {', '.join(sorted(map(wording.title, undecided)))} need more prompts"
    return f"{row.verdict.verdict}: {', '.join(sorted(map(wording.title, lost or undecided)))} not kept"


def smoke(workloads: Sequence[Workload]) -> list[Workload]:
    """Return the smoke test (R40): the first factual question ("What is the capital of Japan?") alone."""
    chosen = next((w for w in workloads if "factual" in w.gates), None)
    if chosen is None:  # a persona's own prompts: words where bf16 has words, without loops
        chosen = replace(workloads[0], gates=("same_text",))
    return [replace(chosen, cases=chosen.cases[:1])]
