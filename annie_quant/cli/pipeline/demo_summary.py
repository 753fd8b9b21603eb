"""The demo's last screen: who loses what, who keeps it at what size, and one sentence about speed."""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant.documents import Aggregates, ModelRow
from annie_quant.judge import decision
from annie_quant.judge.decision.run import JudgedGate, compared_with
from annie_quant.judge.metrics import three_digits

SHOWN = 2  # gates that a sentence names


def summary_lines(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    """Return one sentence per model, one about the speed of candidate and incumbent, and one about what was not tested."""
    models = {model.name: model for model in aggregates.models}
    reference, *others = models.values()
    lines = [
        f"Compared with {_named(reference)}, prompt by prompt, as vLLM and SGLang compute on a GPU (VLLM-CUTLASS) and on a "
        "llama.cpp server (served):"
    ]
    lines += [f"- {_named(model)} {claim(aggregates, model.name)}" for model in others]
    lines += speed(aggregates, models[candidate], models[incumbent])
    chosen = decision.decision(aggregates, candidate)
    not_tested = chosen.not_tested if chosen else ""
    return [*lines, *([f"Not tested: {not_tested}."] if not_tested else [])]


def _named(model: ModelRow) -> str:
    return f"{model.label} ({(model.size_bytes or 0) / 1e6:.1f} MB)"


def claim(aggregates: Aggregates, name: str) -> str:
    """Return what a model keeps or loses, as the rest of a sentence that begins with its name."""
    chosen = decision.decision(aggregates, name)
    if chosen is None or not any(chosen.gates.values()):
        return "was not judged."
    if reasons := chosen.confounded or decision.blocking_of(aggregates, name):
        return f"cannot be compared: {', '.join(reasons)}."
    gates = chosen.gates["fail"] or chosen.gates["undecided"]
    places = len({gate.where for kind in chosen.gates.values() for gate in kind})
    if chosen.standing == "keeps":
        titles = {gate.title for gate in chosen.gates["pass"]}
        return f"keeps all {len(titles)} gates in {places} arithmetic{'' if places == 1 else 's'}."
    verb = {
        "loses": "loses",
        "fragile": "is fragile, it loses in part of the arithmetics",
        "undecided": "loses no gate for sure, too few answers about",
    }
    return f"{verb[chosen.standing]} {_counted(gates)}."


def _counted(gates: Sequence[JudgedGate]) -> str:
    """Return the gates' titles, surest loss first, each with its counts where it lost most."""
    first: dict[str, JudgedGate] = {}
    for gate in sorted(gates, key=lambda g: g.pair.p if g.pair else 1.0):
        first.setdefault(gate.title, gate)
    texts = [
        f"{title} ({gate.pair.lost} of {gate.pair.n} lost and {gate.pair.won} won, {gate.where})"
        if gate.pair
        else title
        for title, gate in first.items()
    ]
    if len(texts) > SHOWN + 1:
        texts = [*texts[:SHOWN], f"{len(texts) - SHOWN} more gates"]
    *first_texts, last = texts
    return f"{', '.join(first_texts)} and {last}" if first_texts else last


def speed(aggregates: Aggregates, candidate: ModelRow, incumbent: ModelRow) -> list[str]:
    """Return one sentence about the times of two served models, in a list; [] where they were not compared."""
    parts = []
    for metric, text in (("decode_tok_s", "writes {} tokens/s"), ("ttft_content_ms", "begins after {} ms")):
        row = compared_with(aggregates, candidate.name, incumbent.name, metric)
        if row is None or row.median_a is None or row.median_b is None:
            continue
        same = "" if row.significant else ", no significant difference"
        parts.append(
            f"{text.format(three_digits(row.median_b))} ({incumbent.label}: {three_digits(row.median_a)}{same})"
        )
    return [f"In llama.cpp on this CPU {candidate.label} {' and '.join(parts)}."] if parts else []
