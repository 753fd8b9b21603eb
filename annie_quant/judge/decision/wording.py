"""Every sentence about a verdict: gates in plain words, the headline, what follows it, the reasons.

The headline is the first line of the terminal, the report, the model card and comparison.md. `head`
has the lines below it: under which server, how sure, what to do next, what was not tested. They name
behaviours and servers; the reasons have the gates' titles and every arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from annie_quant.documents import (
    Comparison,
    GateResult,
    GateVerdict,
    Outcome,
    PairedCounts,
    PairedGate,
    SpeedGate,
    Standing,
)
from annie_quant.judge.decision.rule import (
    NOT_SERVED,
    NOTHING_TESTED,
    POOLED,
    WORST_FIRST,
    JudgedGate,
    Judgement,
    is_two_sided,
)
from annie_quant.judge.gates import GATES
from annie_quant.judge.metrics import METRICS, three_digits
from annie_quant.judge.pairing import MIN_ANSWERS_TO_KEEP

MAX_BEHAVIOURS = 3  # in a headline
MAX_PROFILES = 2
_ALONE = {"keeps": "passes", "loses": "fails"}  # of a requirement, without a reference
OUTCOMES: dict[GateVerdict, Outcome] = {"keeps": "pass", "loses": "fail", "undecided": "undecided"}

# What an answer does that fails a gate.
FAULTS = {
    POOLED: "gets fewer answers right, over all gates together",
    "abstention": "calls a tool where none fits",
    "call_rate": "calls tools less often",
    "factual": "gets a fact wrong",
    "logged_tool": "does not call the tool that the log has",
    "no_markdown": "writes markdown",
    "non_empty": "answers nothing",
    "reasoning": "gets a conclusion wrong",
    "recall": "gets wrong what was said in the conversation",
    "repetition": "repeats itself or writes garble",
    "same_arguments": "calls with other arguments than bf16",
    "same_decline": "calls a tool where bf16 calls none",
    "same_language": "answers in another language than bf16",
    "same_length": "answers at another length than bf16",
    "same_markdown": "writes markdown where bf16 writes none",
    "same_several": "makes other calls where bf16 makes several",
    "same_stop": "does not end where bf16 ends",
    "same_text": "says something else than bf16",
    "same_thinking": "shows its thinking where bf16 shows none",
    "same_tool": "calls another tool than bf16, or none",
    "same_validity": "makes invalid calls where bf16's are valid",
    "scenario": "fails scenarios of tool-eval-bench",
    "several_calls": "misses calls where several are needed",
    "stop": "does not end its answer",
    "thinking_leak": "shows its thinking in the answer",
    "tool_arguments": "calls with wrong arguments",
    "tool_call": "does not call the right tool",
    "tool_call_raw": "writes no valid call in its raw text",
    "tool_schema": "makes calls that do not fit the tool",
    "tool_selection": "chooses the wrong tool",
    "tool_values": "gives a tool wrong values",
    "use_result": "does not use what a tool returned",
    "ttft_content_ms": "answers too late",
    "decode_tok_s": "writes too slowly",
}
# Profile: its name in a headline, and what computes it.
_PROFILES = {
    "float32": ("float32", "no server"),
    "w4a4": ("W4A4", "vLLM CUTLASS"),
    "w4a16": ("W4A16", "Marlin"),
    "w4a4-prompts": ("W4A4 prompts, W4A16 answers", "no released server"),
    "vllm-cutlass": ("vLLM CUTLASS", "W4A4"),
    "vllm-emulation": ("vLLM's emulation", "W4A4"),
    "vllm-marlin": ("vLLM Marlin", "W4A16"),
    "vllm-cpu": ("vLLM on a CPU", "W4A4"),
    "vllm-cpu-w4a16": ("vLLM on a CPU in W4A16", ""),
    "llama.cpp-cpu": ("llama.cpp on a CPU", ""),
    "llama.cpp-blackwell": ("llama.cpp on Blackwell", ""),
    "bf16": ("bf16", ""),
    "served": ("its server", ""),
}
_CACHES = {"-fp8kv": "FP8 cache", "-nvfp4kv": "NVFP4 cache"}


# ---- names and figures


def title(gate: str) -> str:
    """Return a gate's name in tables."""
    if gate == POOLED:
        return "all gates together"
    if gate == NOTHING_TESTED:
        return "no gate tests anything that the reference does"
    if gate in METRICS:
        return METRICS[gate].title
    return GATES[gate].title if gate in GATES else gate


def points(value: float) -> str:
    """Return a share as percentage points: +1.2, -24."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text


def place_name(place: str) -> str:
    """Return the name of an arithmetic in tables and reasons: W4A4+perm1."""
    if place.startswith("served"):
        return place
    profile, plus, arithmetic = place.partition("+")
    return f"{profile.upper()}{plus}{arithmetic}"


def profile_name(profile: str, with_server: bool = False) -> str:
    """Return the name of a profile or server in a sentence.

    with_server: adds what computes it: "W4A4 (vLLM CUTLASS)".
    """
    if profile.startswith("served by "):
        return f"server {profile.removeprefix('served by ')}"
    cache = next((text for suffix, text in _CACHES.items() if profile.endswith(suffix)), "")
    base = profile[: profile.rindex("-")] if cache else profile
    name, server = _PROFILES.get(base, (base.upper(), ""))
    details = ", ".join(filter(None, [server if with_server else "", cache]))
    return f"{name} ({details})" if details else name


def _listed(texts: Sequence[str]) -> str:
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _first_few(texts: Sequence[str], limit: int) -> str:
    """Return the first texts as a list; more than `limit` are counted."""
    if len(texts) <= limit:
        return _listed(texts)
    return _listed([*texts[:limit], f"{len(texts) - limit} more"])


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def is_change(gate: str) -> bool:
    """Return whether a gate shows a change against bf16, which is neither right nor wrong."""
    return gate in GATES and (GATES[gate].basis == "reference" or GATES[gate].two_sided)


def worst_first(gates: Iterable[JudgedGate]) -> list[JudgedGate]:
    """Return one judged gate per gate, the one with most points lost: labels, rules, then changes."""
    by_gate: dict[str, JudgedGate] = {}
    for gate in sorted(gates, key=_points_lost, reverse=True):
        if gate.gate != NOTHING_TESTED:
            by_gate.setdefault(gate.gate, gate)
    return sorted(by_gate.values(), key=lambda gate: _rank(gate.gate))


def _rank(gate: str) -> int:
    if is_change(gate):
        return 2
    return 0 if gate in GATES and GATES[gate].basis == "label" else 1


def _points_lost(gate: JudgedGate) -> float:
    if gate.counts is not None:
        change = (gate.counts.lost - gate.counts.won) / max(1, gate.counts.n)
        return abs(change) if is_two_sided(gate.gate) else change
    return 1 - gate.result.rate if isinstance(gate.result, GateResult) else 0.0


def fault(gate: JudgedGate) -> str:
    """Return what got worse in plain words: "calls a tool where none fits (26 more of 181 prompts)"."""
    counts = gate.counts
    result = gate.result
    text = FAULTS.get(gate.gate, f"fails {title(gate.gate)}")
    if isinstance(result, SpeedGate):
        unit = METRICS[result.metric].unit
        return f"{text} ({result.value:.4g} {unit}, limit {result.limit:g})"
    if counts is not None:
        change = counts.lost - counts.won
        if is_two_sided(gate.gate):
            text = text if change > 0 else "calls tools more often"
            return f"{text} ({abs(change)} of {counts.n} prompts)"
        more = f"{change} more" if change >= 0 else f"{-change} fewer"
        return f"{text} ({more} of {counts.n} prompts)"
    if isinstance(result, GateResult):
        return f"{text} ({result.n - result.passes} of {result.n} prompts)"
    return text


# ---- the headline and the lines below it


def claim(judged: Judgement) -> str:
    """Return the verdict and the worst behaviours, to follow a checkpoint's name: "loses under W4A4: ..."."""
    verdict = judged.verdict
    verb = f"is {verdict}"
    if verdict in ("keeps", "loses"):
        verb = verdict if judged.compared else _ALONE[verdict]
    if verdict == "keeps":
        verb = f"{verb} everything that was tested"
    names = [profile_name(name) for name, own in judged.profiles.items() if own == verdict]
    under = f"{verb} under {_first_few(names, MAX_PROFILES)}" if names else verb
    faults = [fault(gate) for gate in worst_first(judged.causes())]
    # Only the first one says what is counted.
    faults[1:] = [text.replace(" prompts)", ")") for text in faults[1:]]
    behaviours = _first_few(faults, MAX_BEHAVIOURS)
    if verdict == "keeps":
        n_gates = len({gate.gate for gate in judged.gates})
        return f"{under} ({counted(n_gates, 'gate')})"
    if verdict == "loses":
        return f"{under}: {behaviours}"
    if verdict == "fragile":
        return f"{under}: in some of its arithmetics, not in all, it {behaviours}"
    if not behaviours:
        return f"{under}: nothing was tested that bf16 does"
    return f"{under}, too few prompts to exclude that it {behaviours}"


def _sentence(subject: str, text: str) -> str:
    """Return a claim as a sentence.

    subject: the checkpoint's name; "" for a sentence that begins with the claim.
    """
    if subject:
        return f"{subject} {text}."
    text = text.removeprefix("is ")
    return f"{text[:1].upper()}{text[1:]}."


def first_screen(
    subject: str, judged: Judgement, next_step: str, not_tested: str
) -> tuple[str, list[str]]:
    """Return the headline and the lines below it.

    What was not tested is in the headline where nothing worse is to be said there.
    """
    text = claim(judged)
    lines = [f"Where: {_where(judged.profiles)}.", f"How sure: {_how_sure(judged)}."]
    lines.append(f"Next: {next_step}.")
    if not_tested and worst_first(judged.causes()):
        lines.append(f"Not tested: {not_tested}.")
    elif not_tested:
        text = f"{text}; not tested: {not_tested}"
    return _sentence(subject, text), lines


def _where(profiles: Mapping[str, Standing]) -> str:
    parts = []
    for verdict in WORST_FIRST:
        names = [profile_name(p, with_server=True) for p, own in profiles.items() if own == verdict]
        if names:
            parts.append(f"{verdict} under {_first_few(names, MAX_PROFILES)}")
    return "; ".join(parts) or "nothing was compared"


def _how_sure(judged: Judgement) -> str:
    arithmetics = counted(len({gate.place for gate in judged.gates}), "arithmetic")
    if judged.verdict == "keeps":
        if judged.compared:
            return f"no gate loses 5 points or more (95 %), in {arithmetics}"
        return f"by the requirements of the side alone, without bf16, in {arithmetics}"
    causes = worst_first(judged.causes())
    if not causes:
        return f"not at all, no prompt decides ({arithmetics})"
    first = causes[0]
    places = {gate.place for gate in judged.having(first.verdict) if gate.gate == first.gate}
    interval = _interval_alone(first.result)
    if first.counts is not None:
        interval = describe_interval(first.counts)
    return f"{interval}, in {len(places)} of {arithmetics}"


def next_step(judged: Judgement) -> str:
    """Return what to do with a checkpoint that was evaluated."""
    if judged.verdict == "keeps":
        return "serve it (annie-quant serve) and measure its speed (annie-quant bench)"
    if judged.verdict == "undecided":
        return _more_prompts(judged.causes())
    keeping = [
        profile_name(name)
        for name, own in judged.profiles.items()
        if own == "keeps" and name not in NOT_SERVED
    ]
    if keeping:
        return f"serve it under {_listed(keeping)} only, or quantize again: annie-quant search"
    return "do not serve it; try other strategies: annie-quant search"


def _more_prompts(undecided: Sequence[JudgedGate]) -> str:
    if any(gate.gate == NOTHING_TESTED for gate in undecided):
        return "make prompts that test it: annie-quant init"
    sources = [gate.counts or gate.result for gate in undecided]
    needed: list[int] = []
    for source in sources:
        n_to_decide = getattr(source, "n_to_decide", None)
        if n_to_decide is None:
            return "judge more and other prompts"
        needed.append(n_to_decide)
    if not needed:
        return "judge more and other prompts"
    return f"judge more prompts, about {max(needed)} per gate"


def next_for_run(
    judged: Judgement, label: str, incumbent: str, speeds: Sequence[Comparison]
) -> str:
    """Return what to do with the candidate of a run: the verdict first, then the times a user waits.

    incumbent: the label of what it would replace; "" where nothing was measured that it could replace.
    speeds: significant differences, the candidate second.
    """
    if judged.verdict != "keeps":
        advice = next_step(judged)
        return f"stay with {incumbent}; {advice}" if incumbent else advice
    if not incumbent:
        return "it keeps, and nothing was measured that it could replace"
    waits = [row for row in speeds if METRICS[row.metric].user_latency]
    slower = [METRICS[row.metric].title for row in waits if (row.median_difference or 0.0) > 0]
    faster = [METRICS[row.metric].title for row in waits if (row.median_difference or 0.0) < 0]
    if slower and faster:
        return f"weigh it: {label} is better in {_listed(faster)}, worse in {_listed(slower)}"
    if slower:
        return f"stay with {incumbent}: {label} is slower ({_listed(slower)})"
    if faster:
        return f"switch from {incumbent} to {label}: it is faster ({_listed(faster)})"
    return f"stay with {incumbent}: a user waits no less (decode speed alone is no reason)"


# ---- one gate


def reason(gate: JudgedGate) -> str:
    """Return a gate's verdict with its place and figures.

    "w4a4: tool calls loses: 58 lost and 0 won of 240, -24.2 points (90 % -29.0 to -19.9, p 1.7e-18)"
    """
    result = gate.result
    counts = gate.counts
    name = result.title if isinstance(result, GateResult) and result.title else title(gate.gate)
    if gate.gate == NOTHING_TESTED:
        return f"{gate.place}: {name}"
    text = f"{gate.place}: {name} {verdict_word(gate)}"
    if counts is not None:
        figures = f"{counts.lost} lost and {counts.won} won of {counts.n}"
        missing = counts.n - result.n if isinstance(result, GateResult) else 0
        if missing > 0 and isinstance(counts, PairedGate):
            figures += f" ({missing} without an answer to judge)"
        text = f"{text}: {figures}, {describe_interval(counts)}"
        n = counts.n_to_decide if isinstance(counts, PairedGate) else None
    elif isinstance(result, GateResult):
        figures = f"{result.passes} of {result.n}, {_interval_alone(result)}, {result.rule}"
        text = f"{text}: {figures}"
        n = result.n_to_decide
    else:
        return f"{text}: {fault(gate)}, {_interval_alone(result)}"
    if gate.verdict != "undecided":
        return text
    return f"{text}; {f'n = {n} would decide' if n else 'no n decides at this rate'}"


def reasons(gates: Sequence[JudgedGate], verdicts: Container[GateVerdict]) -> list[str]:
    """Return one line per gate with one of the verdicts; a further arithmetic only where it differs.

    Gates that are open because their prompts are few, without a change, are one line together.
    """
    own = {(gate.place, gate.gate): gate.verdict for gate in gates}
    lines: list[str] = []
    unchanged: list[JudgedGate] = []
    for gate in gates:
        is_further = gate.place != gate.profile
        if gate.verdict not in verdicts or (
            is_further and own.get((gate.profile, gate.gate)) == gate.verdict
        ):
            continue
        if gate.verdict == "undecided" and _is_unchanged(gate):
            unchanged.append(gate)
        else:
            lines.append(reason(gate))
    return [*lines, *([_too_few(unchanged)] if unchanged else [])]


def _is_unchanged(gate: JudgedGate) -> bool:
    counts = gate.counts
    return isinstance(counts, PairedGate) and counts.n > 0 and not counts.lost and not counts.won


def _too_few(gates: Sequence[JudgedGate]) -> str:
    """Return one line about gates without a change in too few prompts: "w4a4, w4a16: too few prompts, ... factual (10)"."""
    places = ", ".join(dict.fromkeys(gate.place for gate in gates))
    n_prompts: dict[str, int] = {}
    n_to_decide = 0
    for gate in gates:
        assert isinstance(gate.counts, PairedGate)
        n_prompts[gate.gate] = min(gate.counts.n, n_prompts.get(gate.gate, gate.counts.n))
        n_to_decide = max(n_to_decide, gate.counts.n_to_decide or 0)
    names = ", ".join(f"{title(name)} ({n})" for name, n in n_prompts.items())
    text = f"{places}: undecided, none lost in too few prompts: {names}"
    return f"{text}; n = {n_to_decide} would decide" if n_to_decide else text


def describe_interval(row: PairedCounts) -> str:
    bounds = f"90 % {points(row.low)} to {points(row.high)}"
    return f"{points(row.difference)} points ({bounds}, p {row.p:.2g})"


def _interval_alone(result: GateResult | SpeedGate | None) -> str:
    if result is None or result.low is None or result.high is None:
        return "too few answers for an interval"
    form = ".1%" if isinstance(result, GateResult) else ".4g"
    return f"95 % interval {result.low:{form}} to {result.high:{form}}"


def verdict_word(gate: JudgedGate) -> str:
    """Return keeps, loses or undecided of a comparison; passes, fails or undecided of a requirement."""
    if gate.counts is not None:
        return gate.verdict
    return _ALONE.get(gate.verdict, gate.verdict)


def paired_rule(gate: PairedGate) -> str:
    """Return the rule of a gate's result that was compared with the reference."""
    interval = f"{points(gate.difference)} points, 90 % {points(gate.low)} to {points(gate.high)}"
    counts = f"{gate.lost} lost, {gate.won} won; {interval}, margin {100 * gate.margin:g}"
    return f"paired with the reference: {counts}"


# ---- coverage


def unmet(labels: Mapping[str, PairedGate]) -> list[str]:
    """Return the labelled gates that the reference passes too rarely, with its counts."""
    return [
        f"{title(name)} (the reference passes {gate.passed} of {gate.n})"
        for name, gate in labels.items()
    ]


def coverage(answers: Mapping[str, int], labels: Mapping[str, PairedGate]) -> str:
    """Return what is not tested: labels that bf16 does not meet, and behaviours with too few answers.

    "tool calls (the reference passes 2 of 60), decline, several calls (0 answers)"
    """
    by_number: dict[int, list[str]] = {}
    for behaviour, n in answers.items():
        if n < MIN_ANSWERS_TO_KEEP:
            by_number.setdefault(n, []).append(behaviour)
    behaviours = [
        f"{', '.join(names)} ({counted(n, 'answer')})" for n, names in sorted(by_number.items())
    ]
    return ", ".join([*unmet(labels), *behaviours])


# ---- what blocks a verdict


def blocked(reason: str) -> str:
    return f"{reason}. Undecided, although no gate is lost."


def blocked_head(profiles: Mapping[str, Standing]) -> list[str]:
    return [
        f"Where: {_where(profiles)}.",
        "How sure: what was compared is not what the checkpoint was made to be.",
        "Next: make the export again; annie-quant audit names its faults.",
    ]


def confounded(kinds: Collection[str], has_other_side: bool) -> str:
    effect = "the sides cannot be compared" if has_other_side else "nothing is decided"
    return f"CONFOUNDED ({', '.join(kinds)}): {effect}."


CONFOUNDED_NEXT = "remove what differs (see the caveats) and measure again"


# ---- early looks of a search

_DROPPED = {
    "no margin": "none may be lost",
    "out of reach": "even without a change in the other {rest}, it could not keep",
    "a loss": "a loss (p {p:.2g}, adjusted)",
}


def dropped(name: str, gate: PairedGate, n_at_last_look: int, why: str) -> str:
    """Return why a gate will not keep any more (rule.cannot_keep) as text."""
    counts = f"{title(name)} lost {gate.lost} and won {gate.won} of {gate.n}"
    rest = max(n_at_last_look, gate.n) - gate.n
    return f"{counts}: {_DROPPED[why].format(rest=rest, p=gate.p_holm or 0.0)}"


# ---- a run


def operational_change(before: str, after: str) -> str:
    """Return what a switch between two runtimes means for who operates the machine (requirement R51)."""
    return f"operational change: {before} → {after} (another server to install, start and monitor)"


def difference(row: Comparison, incumbent: str) -> str:
    """Return a significant difference of times or lengths, the candidate second."""
    metric = METRICS[row.metric]
    change = row.median_difference or 0.0
    words = {
        "lower": ("better", "worse"),
        "higher": ("worse", "better"),
        "neither": ("shorter", "longer"),
    }
    kind = words[metric.better][change > 0]
    interval = f"95 % {three_digits(row.low or 0.0)} to {three_digits(row.high or 0.0)}"
    return (
        f"{metric.title} is {kind} than {incumbent}'s by {three_digits(abs(change))} {metric.unit} "
        f"({interval}, {row.n_prompts} prompts, Holm p {row.p_holm:.2g})"
    )
