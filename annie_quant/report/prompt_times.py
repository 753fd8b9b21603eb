"""The first token in pages: over computed prompt tokens and over turns, ratios of two sides, and what kernels can explain."""

from __future__ import annotations

from collections.abc import Iterator

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.first_token import SERVERS
from annie_quant.checkpoint.kernel_ratio import (
    BASE_SERVER,
    NVFP4_KERNELS,
    KernelRatios,
    kernel_ratios,
)
from annie_quant.checkpoint.prompt_work import work_of
from annie_quant.core.errors import AnnieError
from annie_quant.documents import PrefillLine, TurnPoint
from annie_quant.documents.results import CacheState
from annie_quant.models.formats import MIXED
from annie_quant.report import format
from annie_quant.report.run import LoadedRun, ServedModel
from annie_quant.report.tables import Cell, Table

_CACHES: dict[CacheState, str] = {
    "cold": "not cached",
    "cached": "after a cached prefix",
    "unknown": "cached tokens not known",
}
# Findings without which no ratio of two sides' times to the first token is printed.
HIDING = ("vllm", "sglang")
LIMITING = (
    "different_cached",
    "cache_unknown",
    "cold_length",
    "different_prompts",
    "prefix_cache_hit",
)
_MEASURE = "annie-quant bench --workloads first_token"


def lines_table(run: LoadedRun) -> Table:
    """One row per side and state of its cache: the line over computed prompt tokens."""
    table = Table(
        "First token of any kind over the prompt tokens that the server computes, one request in flight: Theil and Sen's line "
        "over prompts with its 95 % interval. Its slope compares servers, whatever the prompts' lengths",
        "model",
    )
    for side in run.served:
        for line in run.aggregates.prefill.get(side.name, []):
            tokens = (line.fewest_tokens, line.most_tokens)
            cells = {
                "prompts": Cell(_CACHES[line.cache], css="word"),
                "n": Cell(f"{format.count(line.n_prompts)} ({format.count(line.n)} requests)"),
                "computed tokens": Cell(format.ends(list(tokens))),
                "ms per 1,000 tokens": Cell(
                    format.significant(line.ms_per_1000), sort=line.ms_per_1000
                ),
                "interval": Cell(format.interval(line.low, line.high) or format.DASH),
                "ms at 0 tokens": Cell(format.significant(line.start_ms), sort=line.start_ms),
            }
            table.add(f"{run.label(side.model)}, {side.title}", cells)
    return table


def lengths_table(run: LoadedRun) -> Table:
    """One row per length of a prompt, one column per side: the median time of prompts that were not cached."""
    table = Table("Milliseconds to the first token of prompts that were not cached", "tokens")
    columns: list[dict[int, tuple[float, int]]] = []
    for side in run.served:
        line = _line(run, side, "cold")
        if line is not None:
            table.header.append(run.label(side.model))
            points = {_nearest(p.tokens): (p.ms, p.n_prompts) for p in line.points}
            columns.append(points)
    for tokens in sorted(set().union(*columns)):
        cells = []
        for column in columns:
            ms, n = column.get(tokens, (None, 0))
            cells.append(Cell(format.significant(ms), f"n = {n}" if n else "", sort=ms))
        table.rows.append((f"about {format.count(tokens)}", cells))
    return table


def _nearest(tokens: int) -> int:
    """Return the power of two next to a length, so that sides with other templates share a row."""
    lower = 1 << max(0, tokens.bit_length() - 1)
    return lower if tokens * tokens < 2 * lower * lower else 2 * lower


def turns_table(run: LoadedRun) -> Table:
    """One row per turn; per side its TTFT, its prompt tokens, and how many of these were cached."""
    sides = [side for side in run.served if run.aggregates.turns.get(side.name)]
    table = Table("Over the turns of a conversation, medians", "turn")
    table.header = ["content TTFT, ms", "prompt tokens", "cached tokens"] * len(sides)
    table.groups = [(run.label(side.model), 3, side.model) for side in sides]
    by_side = [_turns(run, side) for side in sides]
    for turn in sorted(set().union(*by_side)):
        cells = []
        for points in by_side:
            point = points.get(turn, TurnPoint(turn=turn, n=0))
            cells.append(Cell(format.significant(point.ttft_content_ms)))
            cells.append(Cell(format.count(point.prompt_tokens)))
            unknown = "not known" if point.n else format.DASH
            cached = point.cached_tokens
            cells.append(Cell(unknown if cached is None else format.count(cached)))
        table.rows.append((str(turn), cells))
    return table


def _turns(run: LoadedRun, side: ServedModel) -> dict[int, TurnPoint]:
    return {point.turn: point for point in run.aggregates.turns.get(side.name, [])}


def _line(run: LoadedRun, side: ServedModel, cache: CacheState) -> PrefillLine | None:
    lines = run.aggregates.prefill.get(side.name, [])
    return next((line for line in lines if line.cache == cache), None)


def statements(run: LoadedRun) -> list[str]:
    """Return the ratio of two sides with what limits it, and what their kernels can explain; [] without two sides."""
    sides = _two_sides(run)
    if sides is None or not any(run.aggregates.prefill.get(side.name) for side in sides):
        return []
    return [*_ratio(run, *sides), *_limits(run, *sides), *_kernels(run, *sides)]


def _two_sides(run: LoadedRun) -> tuple[ServedModel, ServedModel] | None:
    """Return the candidate and what it would replace, else the only two sides."""
    if run.candidate is not None and run.incumbent is not None:
        return run.candidate, run.incumbent
    served = run.served
    return (served[0], served[1]) if len(served) == 2 else None


def _ratio(run: LoadedRun, a: ServedModel, b: ServedModel) -> Iterator[str]:
    for cache in ("cold", "cached"):
        left = _line(run, a, cache)
        right = _line(run, b, cache)
        if left and right and _has_ratio(left) and _has_ratio(right):
            yield _ratio_text(run, (a, left), (b, right))
    if not (_slope(run, a) and _slope(run, b)):
        reasons = [_without_slope(run, side) for side in (a, b) if not _slope(run, side)]
        yield f"No ratio of the first token of cold prompts: {'; '.join(reasons)} ({_MEASURE})."


def _slope(run: LoadedRun, side: ServedModel) -> bool:
    line = _line(run, side, "cold")
    return line is not None and _has_ratio(line)


def _has_ratio(line: PrefillLine) -> bool:
    return bool(line.ms_per_1000 and line.high) and (line.low or 0.0) > 0


def _without_slope(run: LoadedRun, side: ServedModel) -> str:
    label = run.label(side.model)
    line = _line(run, side, "cold")
    if line is None:
        reported = any(run.aggregates.prefill.get(side.name, []))
        unknown = reported and _line(run, side, "unknown") is not None
        return (
            f"{label} does not report cached tokens" if unknown else f"{label} has no cold prompt"
        )
    if line.ms_per_1000 is not None:
        return f"the slope of {label} is not known to be above 0"
    tokens = format.ends([line.fewest_tokens, line.most_tokens])
    return f"{label} has {format.count(line.n_prompts)} cold prompts of {tokens} tokens"


def _ratio_text(
    run: LoadedRun, first: tuple[ServedModel, PrefillLine], second: tuple[ServedModel, PrefillLine]
) -> str:
    """Return the ratio of two slopes; its bounds are those of their intervals, so it is wider than 95 %."""
    ordered = sorted((first, second), key=lambda pair: pair[1].ms_per_1000 or 0.0)
    fast = ordered[0][1]
    slow = ordered[1][1]
    ratio = (slow.ms_per_1000 or 0.0) / (fast.ms_per_1000 or 1.0)
    low = (slow.low or 0.0) / (fast.high or 1.0)
    high = (slow.high or 0.0) / (fast.low or 1.0)
    times = [
        f"{run.label(side.model)} {format.significant(line.ms_per_1000)} ms"
        for side, line in ordered
    ]
    bounds = f"{format.significant(low)} to {format.significant(high)}"
    return (
        f"1,000 computed prompt tokens, {_CACHES[fast.cache]}: {times[0]}, {times[1]}; "
        f"{format.significant(ratio)} times ({bounds})."
    )


def _limits(run: LoadedRun, a: ServedModel, b: ServedModel) -> list[str]:
    names = {a.name, b.name}
    texts = []
    for confound in run.aggregates.confounds:
        if confound.code in LIMITING and names.issuperset(confound.backends):
            texts.append(f"Limits this: {confound.message}.")
    return texts


# ---- what kernels can explain


def _kernels(run: LoadedRun, a: ServedModel, b: ServedModel) -> Iterator[str]:
    nvfp4 = next((side for side in (a, b) if _may_be_nvfp4(run, side)), None)
    other = next((side for side in (a, b) if _may_be_q4(run, side)), None)
    if nvfp4 is None or other is None:
        return
    server = _server(nvfp4)
    known = _known_ratios(run, nvfp4, server)
    parts = [f"{format.significant(ratio)} times in {name}" for name, ratio in known.ratios.items()]
    yield (
        f"What kernels explain on a GB10, {format.count(known.tokens)} computed tokens: the first token of NVFP4 in "
        f"{SERVERS[server]} is earlier than that of Q4_K_M in llama.cpp by a factor of {', '.join(parts)} (predicted for "
        f"{known.model}, each time within {known.error_90:.0%}). A larger ratio has another cause: cached tokens, other "
        "prompts, first requests."
    )
    if not run.gpu_names or any("GB10" in gpu for gpu in run.gpu_names):
        yield from _unexplained(run, nvfp4, other, known)


def _format(run: LoadedRun, side: ServedModel) -> str:
    return (side.data.format or run.model(side.model).format).upper()


def _may_be_nvfp4(run: LoadedRun, side: ServedModel) -> bool:
    """Return whether a side has NVFP4 linears, or hides its format (in a container) and is not llama.cpp."""
    known = _format(run, side)
    return "FP4" in known or known == MIXED or (not known and side.data.runtime in HIDING)


def _may_be_q4(run: LoadedRun, side: ServedModel) -> bool:
    known = _format(run, side)
    return known.startswith("Q4") or (not known and side.data.runtime == BASE_SERVER)


def _server(side: ServedModel) -> str:
    runtime = (side.data.runtime or "").lower()
    return runtime if runtime in NVFP4_KERNELS else "vllm"


def _known_ratios(run: LoadedRun, side: ServedModel, server: str) -> KernelRatios:
    folder = run.folder_of(side.model)
    if folder is not None:
        try:
            return kernel_ratios(
                server, work_of(ModelFolder(folder), server), run.label(side.model)
            )
        except AnnieError:
            pass  # its files cannot be read
    return kernel_ratios(server)


def _unexplained(
    run: LoadedRun, nvfp4: ServedModel, other: ServedModel, known: KernelRatios
) -> Iterator[str]:
    """Yield the turn with the largest ratio, if that is more than kernels explain."""
    fast = _turns(run, nvfp4)
    slow = _turns(run, other)
    ratios = {}
    for turn in fast.keys() & slow.keys():
        ours = fast[turn].ttft_content_ms
        theirs = slow[turn].ttft_content_ms
        if ours and theirs:
            ratios[turn] = theirs / ours
    turn = max(ratios, key=lambda turn: ratios[turn], default=0)
    if turn and ratios[turn] > known.largest:
        cached = [
            f"{run.label(side.model)} had {_cached_text(points[turn])}"
            for side, points in ((nvfp4, fast), (other, slow))
        ]
        yield (
            f"Turn {turn}: {format.significant(ratios[turn])} times, which kernels do not explain (at most "
            f"{format.significant(known.largest)}): {', '.join(cached)}."
        )


def _cached_text(point: TurnPoint) -> str:
    if point.cached_tokens is None:
        return "cached tokens that are not known"
    return (
        f"{format.count(point.cached_tokens)} of {format.count(point.prompt_tokens)} tokens cached"
    )
