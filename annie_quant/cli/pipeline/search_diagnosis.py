"""Why a strategy of a search failed, or why none can pass: questions that the models themselves answer (R46, R47).

Does the bf16 model pass the gates? If not, it is the base model, not the fine-tune, and no quantization helps. Does a hardened
system prompt restore the behaviour? Then the signal is there, and a lighter strategy may be enough. Do the weights alone cause
it? Gates that pass under W4A16 and fail under W4A4 are lost to the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from annie_quant import documents, judge
from annie_quant.cli.pipeline.stages import Stages
from annie_quant.data import Persona, load_persona
from annie_quant.judge import Workload
from annie_quant.judge.decision import failing

MANNERS = ("tool_call", "no_markdown", "thinking_leak")
PROMPT_GATES = (*MANNERS, "non_empty", "stop")  # gates that a stronger prompt may restore
HARDENED_N = 40
WRONG_MODEL = "WRONG MODEL"


def lost_gates(row: documents.StrategyRow) -> dict[str, documents.GateTable]:
    """Return, per numerics, the gates of which the row's strategy lost answers."""
    tables = {}
    for kind, side in row.numerics.items():
        lost = {name for name, pair in side.paired.items() if pair.lost}
        tables[kind] = {name: gate for name, gate in side.gates.items() if name in lost}
    return tables


def reference_report(gates: documents.GateTable) -> str | None:
    """Return what it means that bf16 itself misses requirements; None if it misses none."""
    missed = [
        (name, gate) for name, gate in gates.items() if gate.meets == "fail" and not gate.advisory
    ]
    failed = {name: f"{name} {gate.passes} of {gate.n}" for name, gate in missed}
    lost = [g for g in failed if g in MANNERS]
    if len(lost) >= 2 or "tool_call" in lost:
        return (
            f"{WRONG_MODEL}: --model itself does not have the manners ({', '.join(failed[g] for g in lost)}). "
            "It looks like the base model: give the fine-tuned bf16 checkpoint"
        )
    counts = ", ".join(failed.values())
    text = f"the bf16 model itself misses requirements: {counts}. Strategies are compared with it, prompt by prompt"
    return text if failed else None


def hardened_prompt(persona: Persona) -> str:
    """Return the persona's prompt followed by its rules as numbered critical rules (R47)."""
    of_tools = (
        ["When a tool is needed, emit ONLY the tool call, with no text."] if persona.tools else []
    )
    numbered = "\n".join(f"{i}. {rule}" for i, rule in enumerate([*persona.rules, *of_tools], 1))
    return f"{persona.system_prompt}\nCRITICAL RULES (violations cause errors):\n{numbered}"


def hardened(
    stages: Stages,
    strategy: str,
    workloads: Sequence[Workload],
    tables: Mapping[str, documents.GateTable],
) -> documents.Hardened | None:
    """Evaluate the failing gates' prompts again under a hardened prompt. tables: gates per numerics.

    Returns None if no gate fails that a prompt may restore.
    """
    lost = [
        (kind, gate)
        for kind, table in tables.items()
        for gate in failing(table)
        if gate in PROMPT_GATES
    ]
    plain = [
        w
        for w in workloads
        if {gate for _, gate in lost} & {*w.gates} and w.persona and not w.system
    ]
    if not plain:
        return None
    chosen = judge.sample(plain, HARDENED_N)
    prompts = [replace(w, system=hardened_prompt(load_persona(str(w.persona)))) for w in chosen]
    numerics = tuple(dict.fromkeys(kind for kind, _ in lost))
    result = stages.evaluate(
        f"{strategy}-hardened", stages.checkpoint(strategy), prompts, numerics=numerics
    )
    rows: dict[str, documents.HardenedGate] = {}
    for kind, gate in lost:
        after = result.numerics[kind].gates.get(gate)
        reference = result.reference_gates.get(gate)
        if after is not None and reference is not None:
            before, under, bf16 = ([r.passes, r.n] for r in (tables[kind][gate], after, reference))
            rows[f"{kind.upper()} {gate}"] = documents.HardenedGate(
                before, under, bf16, restored(after, reference)
            )
    return documents.Hardened(rows, reading([row.restored for row in rows.values()]))


def restored(after: documents.GateResult, reference: documents.GateResult) -> bool | None:
    """Return whether a gate passes again under the hardened prompt; None if bf16 itself fails it under that prompt."""
    if after.verdict != "fail" or after.passes * reference.n >= reference.passes * after.n:
        return True
    return None if reference.verdict == "fail" else False


def reading(restored: Iterable[bool | None]) -> str:
    """Return the conclusion from a hardened prompt (R47)."""
    known = [r for r in restored if r is not None]
    if not known:
        return "no conclusion: bf16 itself does not hold under the hardened prompt"
    if all(known):
        return "restored: the signal is there and needs a stronger prompt; a lighter strategy may be enough"
    return (
        "not restored: the signal is destroyed; it needs more bits in the right places, or training"
    )


def by_activations(tables: Mapping[str, documents.GateTable]) -> str | None:
    """Return a description of the gates that only W4A4 fails, or None. tables: gates per numerics."""
    if not {"w4a4", "w4a16"} <= tables.keys():
        return None
    only = ", ".join(g for g in failing(tables["w4a4"]) if g not in failing(tables["w4a16"]))
    return (
        f"held under W4A16: {only}; the loss comes from quantizing activations, not weights"
        if only
        else None
    )
