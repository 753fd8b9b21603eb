"""Quality retention: what a quantized model keeps of bf16's scores, from lm-eval's sample records of two runs (--log_samples).

Samples are paired by task, filter and document; only pairs of the same prompt and target count. Per metric:

binary (0 or 1)     difference with Tango's score interval, lost and won samples, McNemar's exact p (one-sided, towards a loss)
other numbers       difference of means with a paired bootstrap interval
(sum, weight)       perplexities: exp(-sum / weight) of both, and their ratio, with a paired bootstrap interval

retention is quantized / bf16 (perplexities: bf16 / quantized, so that less is worse), with a paired bootstrap interval of the
ratio. Intervals are 95 %. p_holm adjusts p over the binary metrics of the table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.judge.statistics import holm, mcnemar, score_interval

if TYPE_CHECKING:
    from annie_quant.judge.statistics import Floats

RESAMPLES = 2000
LEAST_RESAMPLED = 10  # samples for a bootstrap interval
Key = tuple[str, str, str]  # task, filter, document


class RetentionRow(msgspec.Struct, kw_only=True):
    """One metric of one task.

    n: paired samples.
    low, high: interval of the difference quantized - bf16.
    """

    task: str
    metric: str
    filter: str
    n: int
    bf16: float
    quantized: float
    difference: float
    low: float | None = None
    high: float | None = None
    retention: float | None = None
    retention_low: float | None = None
    retention_high: float | None = None
    lost: int | None = None
    won: int | None = None
    p: float | None = None
    p_holm: float | None = None


class Retention(msgspec.Struct, kw_only=True):
    """The table.

    left_out: reason → samples that are not in it.
    """

    bf16: str
    quantized: str
    rows: list[RetentionRow]
    left_out: dict[str, int] = {}


class ScoredSample(msgspec.Struct):
    """One line of lm-eval's samples_*.jsonl, as far as it is used here.

    identity: hashes of document, prompt and target.
    """

    identity: tuple[str, ...]
    values: dict[str, object]


def compare_runs(bf16: Path, quantized: Path, seed: int = 0) -> Retention:
    """Compare two runs of lm-eval: folders of --output_path, or sample files.

    Raises UsageError where a run has no samples, or no sample is in both.
    """
    before, after = read_samples(bf16), read_samples(quantized)
    shared = [key for key in before if key in after]
    same = [key for key in shared if before[key].identity == after[key].identity]
    other = len(shared) - len(same)
    left_out = {
        "in one run only": len(before.keys() ^ after.keys()),
        "another prompt or target": other,
    }
    if not same:
        message = f"{bf16} and {quantized} have no sample in common"
        raise UsageError(message, "run the same --tasks with the same options twice")
    groups: dict[tuple[str, str, str], list[tuple[object, object]]] = {}
    for key in same:
        task, name, _ = key
        for metric, value in before[key].values.items():
            if metric in after[key].values:
                groups.setdefault((task, metric, name), []).append(
                    (value, after[key].values[metric])
                )
    rows = [row for names, pairs in groups.items() if (row := compare_metric(*names, pairs, seed))]
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
    return Retention(
        bf16=str(bf16),
        quantized=str(quantized),
        rows=rows,
        left_out={k: n for k, n in left_out.items() if n},
    )


def read_samples(run: Path) -> dict[Key, ScoredSample]:
    """Return the samples of a run, the newest file per task."""
    files = [run] if run.is_file() else sorted(run.rglob("samples_*.jsonl"), key=lambda f: f.name)
    samples: dict[Key, ScoredSample] = {}
    newest = {_task(file): file for file in files}
    for task, file in newest.items():
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            try:
                raw = json.loads(line)
                key = (task, str(raw.get("filter", "none")), str(raw["doc_id"]))
                identity = tuple(
                    str(raw.get(name, "")) for name in ("doc_hash", "prompt_hash", "target_hash")
                )
                samples[key] = ScoredSample(
                    identity, {m: raw[m] for m in raw["metrics"] if m in raw}
                )
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                message = f"{file}, line {number}: not a sample of lm-eval"
                raise UsageError(message, "lm-eval --log_samples writes them") from None
    if not samples:
        raise UsageError(
            f"{run} has no samples of lm-eval", "run lm-eval with --log_samples --output_path"
        )
    return samples


def _task(file: Path) -> str:
    """Return the task in samples_TASK_DATE.jsonl."""
    name = file.stem.removeprefix("samples_")
    head, _, date = name.rpartition("_")
    return head if head and date[:2].isdigit() else name


def compare_metric(
    task: str, metric: str, name: str, pairs: Sequence[tuple[object, object]], seed: int
) -> RetentionRow | None:
    """Return the row of a metric's (bf16, quantized) values; None where they are not numbers."""
    import numpy as np

    weighted = all(_is_weighted(value) for pair in pairs for value in pair)
    # bits_per_byte is the logarithm of byte_perplexity, from the same values.
    if metric == "bits_per_byte" or not (
        weighted or all(_is_number(value) for pair in pairs for value in pair)
    ):
        return None
    values = np.array(pairs, dtype=np.float64).reshape(len(pairs), -1)

    def scores(means: Floats) -> Floats:
        if not weighted:
            return means
        logarithms = np.stack([-means[..., 0] / means[..., 1], -means[..., 2] / means[..., 3]], -1)
        return np.exp(np.minimum(logarithms, 700.0))

    before, after = map(float, scores(values.mean(0)))
    row = RetentionRow(
        task=task,
        metric=metric,
        filter=name,
        n=len(pairs),
        bf16=before,
        quantized=after,
        difference=after - before,
    )
    means = _resampled(values, seed)
    resampled = None if means is None else scores(means)
    if not weighted and set(np.unique(values)) <= {0.0, 1.0}:
        row.lost, row.won = (
            int((values[:, 0] > values[:, 1]).sum()),
            int((values[:, 0] < values[:, 1]).sum()),
        )
        row.low, row.high = score_interval(row.lost, row.won, row.n, 0.95)
        row.p = mcnemar(row.lost, row.won)
    elif resampled is not None:
        row.low, row.high = _quantiles(resampled[:, 1] - resampled[:, 0])
    if before > 0:
        row.retention = before / after if weighted else after / before
        if resampled is not None and (resampled[:, 0] > 0).all():
            ratio = resampled[:, 1] / resampled[:, 0]
            row.retention_low, row.retention_high = _quantiles(1 / ratio if weighted else ratio)
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_weighted(value: object) -> bool:
    """Return whether a value is (log-likelihood, words or bytes), as lm-eval stores perplexities."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(map(_is_number, value))
        and value[1] > 0
    )


def _resampled(values: Floats, seed: int) -> Floats | None:
    """Return the column means of RESAMPLES bootstrap samples of the rows; None for too few rows."""
    import numpy as np

    n = len(values)
    if n < LEAST_RESAMPLED:
        return None
    rng = np.random.default_rng(seed)
    means = np.empty((RESAMPLES, values.shape[1]))
    for i in range(RESAMPLES):
        means[i] = values[rng.integers(0, n, n)].mean(0)
    return means


def _quantiles(values: Floats) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def lines(table: Retention) -> Iterator[str]:
    """Yield the table as text, at most 80 columns where names are short."""
    head = (
        "task",
        "metric",
        "n",
        "bf16",
        "quant.",
        "difference (95 %)",
        "retention (95 %)",
        "lost/won",
    )
    rows = [head, *(_cells(row) for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        yield " ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )


def _cells(row: RetentionRow) -> tuple[str, ...]:
    scale = 1.0 if row.lost is None else 100.0
    difference = f"{scale * row.difference:+.3g}"
    if row.low is not None and row.high is not None:
        difference += f" ({scale * row.low:+.3g} {scale * row.high:+.3g})"
    share = "–" if row.retention is None else f"{row.retention:.1%}"
    if row.retention_low is not None and row.retention_high is not None:
        share += f" ({100 * row.retention_low:.1f} {100 * row.retention_high:.1f})"
    metric = row.metric if row.filter in ("none", "") else f"{row.metric},{row.filter}"
    changed = "–" if row.lost is None else f"{row.lost}/{row.won}"
    return (
        row.task,
        metric,
        str(row.n),
        f"{row.bf16:.4g}",
        f"{row.quantized:.4g}",
        difference,
        share,
        changed,
    )


def summary(table: Retention) -> Iterator[str]:
    """Yield what follows from the table, one line each."""
    lost = [row for row in table.rows if row.p_holm is not None and row.p_holm < 0.05]
    for row in lost:
        yield f"{row.task} {row.metric}: a significant loss ({row.lost} lost, {row.won} won of {row.n}; p {row.p_holm:.2g}, Holm)"
    if not lost and any(row.p is not None for row in table.rows):
        yield "no significant loss; the intervals state which losses the samples cannot exclude"
    for reason, n in table.left_out.items():
        yield f"left out: {n} samples ({reason})"
