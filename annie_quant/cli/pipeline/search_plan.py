"""`annie-quant search --dry-run`: time and memory per strategy before anything is made."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from annie_quant.cli.pipeline import SearchSettings
from annie_quant.cli.pipeline.search_text import duration
from annie_quant.cli.pipeline.stages import NamedStrategy, offline_prompts
from annie_quant.core.errors import AnnieError
from annie_quant.core.progress import Progress
from annie_quant.judge import Workload
from annie_quant.judge.decision import looks
from annie_quant.quantize import estimates
from annie_quant.quantize.rates import Rates, measure_rates
from annie_quant.quantize.strategies import find
from annie_quant.report.format import size

# Steps of Estimate.seconds that are done once: for all budgets of a strategy, and for all strategies.
STEPS_OF_STRATEGY = ("start", "text")
STEPS_OF_SEARCH = ("own answers",)


@dataclass(frozen=True)
class PlannedStrategy:
    """What one strategy takes.

    quantize_s, evaluate_s: seconds, at most: an early look may drop the strategy.
    memory_bytes: the most of both steps.
    fault: why it cannot be made; "" where it can.
    """

    name: str
    quantize_s: float = 0.0
    evaluate_s: float = 0.0
    memory_bytes: float = 0.0
    fault: str = ""

    @property
    def seconds(self) -> float:
        return self.quantize_s + self.evaluate_s


@dataclass(frozen=True)
class EvaluationEstimate:
    """Seconds of bf16's own answers, which all strategies share, and per strategy; memory of both models."""

    reference_s: float
    strategy_s: float
    memory_bytes: float


def dry_run(
    settings: SearchSettings,
    order: Sequence[str],
    workloads: Sequence[Workload],
    progress: Progress,
) -> list[str]:
    """Return the estimate of a search as lines: the strategies in their order, then the sum."""
    progress.message("measuring this machine")
    rates = measure_rates()
    progress.message("timing a few answers of the bf16 model")
    evaluation = estimate_evaluation(settings, workloads)
    rows = []
    measured = set[str]()
    answered = False
    for name in order:
        progress.message(name)
        strategy = NamedStrategy.of(name).name
        done: list[str] = []
        if strategy in measured:
            done += STEPS_OF_STRATEGY
        if answered:
            done += STEPS_OF_SEARCH
        row = plan_strategy(settings, name, rates, evaluation, done)
        rows.append(row)
        measured.add(strategy)
        answered |= find(strategy).cost.reads_answers and not row.fault
    return plan_lines(rows, evaluation, rates)


def plan_strategy(
    settings: SearchSettings,
    name: str,
    rates: Rates,
    evaluation: EvaluationEstimate,
    done: Collection[str] = (),
) -> PlannedStrategy:
    """Return what one strategy takes. done: steps that an earlier one has done."""
    strategy = NamedStrategy.of(name).name
    try:
        estimate = estimates.estimate(
            settings.model,
            strategy,
            settings.samples,
            rates=rates,
            calib_data=settings.calib_data,
            calib_tokens=settings.calib_tokens,
            answers=settings.answers,
        )
    except AnnieError as error:
        return PlannedStrategy(name, fault=error.message)
    steps = {step: s for step, s in estimate.seconds.items() if step not in done}
    return PlannedStrategy(
        name,
        quantize_s=settings.seeds * sum(steps.values()),
        evaluate_s=settings.seeds * evaluation.strategy_s,
        memory_bytes=max(estimate.peak_bytes, evaluation.memory_bytes),
    )


def estimate_evaluation(
    settings: SearchSettings, workloads: Sequence[Workload]
) -> EvaluationEstimate:
    """Time a few answers of the bf16 model, which stands for the checkpoints too."""
    from annie_quant.offline import estimate
    from annie_quant.offline.pair import EvaluationJob, open_pair

    prompts = offline_prompts(settings.n, workloads)
    n_numerics = len(settings.required) or len(EvaluationJob.numerics)
    with tempfile.TemporaryDirectory(prefix="annie-quant-") as cache:
        job = EvaluationJob(checkpoint=settings.model, reference=settings.model, cache=Path(cache))
        with open_pair(job) as pair:
            seconds = estimate.estimated_seconds(pair, prompts, n_numerics)
            memory_bytes = estimate.memory_estimate(pair)
    # An early look has part of the prompts, in the first arithmetic alone.
    n_looks = 1 if settings.every else len(looks(settings.n))
    early = (n_looks - 1) * looks(settings.n)[0] / settings.n
    strategy_s = (1 + early) * seconds.checkpoint
    return EvaluationEstimate(seconds.reference, strategy_s, memory_bytes)


def plan_lines(
    rows: Sequence[PlannedStrategy], evaluation: EvaluationEstimate, rates: Rates
) -> list[str]:
    """Return the table, and the sum in its last line."""
    width = max(len(row.name) for row in rows)
    lines = [f"bf16's own answers: {duration(evaluation.reference_s)}"]
    for row in rows:
        if row.fault:
            lines.append(f"{row.name:<{width}}  cannot be made: {row.fault}")
            continue
        fits = "" if row.memory_bytes <= rates.memory else ", DOES NOT FIT"
        lines.append(
            f"{row.name:<{width}}  quantize {duration(row.quantize_s)}, "
            f"evaluate {duration(row.evaluate_s)}, "
            f"memory {size(row.memory_bytes)}{fits}"
        )
    total = evaluation.reference_s + sum(row.seconds for row in rows)
    first = evaluation.reference_s + next((row.seconds for row in rows if not row.fault), 0.0)
    lines.append(
        f"at most {duration(total)} in all, {duration(first)} if the first one "
        f"keeps every gate; {size(rates.memory)} of memory are free"
    )
    return lines
