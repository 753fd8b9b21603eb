"""Find out why a strategy failed, or why none can pass, by asking the models themselves (R46, R47).

- Does the bf16 model pass the gates? If not, it is the base model, not the fine-tune, and no quantization helps.
- Does a hardened system prompt restore the behaviour? Then the signal is there, and a lighter strategy may be enough.
- Do the weights alone cause it? Gates that pass under W4A16 and fail under W4A4 are lost to the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from annie_quant import judge
from annie_quant.cli.pipeline.stages import Stages
from annie_quant.data import Persona, load_persona
from annie_quant.documents import GateResult, GateTable, Hardened, HardenedGate
from annie_quant.judge import Workload
from annie_quant.judge.decision import failing

MANNERS = ("tool_call", "no_markdown", "thinking_leak")
PROMPT_GATES = (*MANNERS, "non_empty", "stop")  # gates that a stronger prompt may restore
HARDENED_N = 40
WRONG_MODEL = "WRONG MODEL"


def smoke(workloads: Sequence[Workload]) -> list[Workload]:
    """Return the smoke test (R40): the first factual question ("What is the capital of Japan?") alone."""
    chosen = next((w for w in workloads if "factual" in w.gates), None)
    if chosen is None:  # a persona's own prompts: words where bf16 has words, without loops
        chosen = replace(workloads[0], gates=("same_text",))
    return [replace(chosen, cases=chosen.cases[:1])]


def reference_report(gates: GateTable) -> str | None:
    """Return what it means that bf16 itself misses requirements; None if it misses none."""
    failed = [name for name, result in gates.items() if result.meets == "fail" and not result.advisory]
    lost = [g for g in failed if g in MANNERS]
    if len(lost) >= 2 or "tool_call" in lost:
        counts = ", ".join(f"{g} {gates[g].passes} of {gates[g].n}" for g in lost)
        return (
            f"{WRONG_MODEL}: --model itself does not have the manners ({counts}). "
            "It looks like the base model: give the fine-tuned bf16 checkpoint"
        )
    if failed:
        counts = ", ".join(f"{g} {gates[g].passes} of {gates[g].n}" for g in failed)
        return f"the bf16 model itself misses requirements: {counts}. Strategies are compared with it, prompt by prompt"
    return None


def hardened_prompt(persona: Persona) -> str:
    """Return the persona's prompt followed by its rules as numbered critical rules (R47)."""
    rules = [
        *persona.rules,
        *(["When a tool is needed, emit ONLY the tool call, with no text."] if persona.tools else []),
    ]
    numbered = "\n".join(f"{i}. {rule}" for i, rule in enumerate(rules, 1))
    return f"{persona.system_prompt}\nCRITICAL RULES (violations cause errors):\n{numbered}"


def hardened(
    stages: Stages, strategy: str, workloads: Sequence[Workload], tables: Mapping[str, GateTable]
) -> Hardened | None:
    """Evaluate the failing gates' prompts again under a hardened prompt.

    tables: gates per numerics.

    Returns None if no gate fails that a prompt may restore.
    """
    lost = {kind: [g for g in failing(table) if g in PROMPT_GATES] for kind, table in tables.items()}
    lost = {kind: gates for kind, gates in lost.items() if gates}
    lost_gates = {g for gates in lost.values() for g in gates}
    plain = [w for w in workloads if lost_gates & set(w.gates) and w.persona and not w.system]
    prompts = [
        replace(w, system=hardened_prompt(load_persona(str(w.persona)))) for w in judge.sample(plain, HARDENED_N)
    ]
    if not prompts:
        return None
    result = stages.evaluate(f"{strategy}-hardened", stages.checkpoint(strategy), prompts, numerics=tuple(lost))
    rows: dict[str, HardenedGate] = {}
    for kind, gates in lost.items():
        for gate in gates:
            after, reference = result.numerics[kind].gates.get(gate), result.reference_gates.get(gate)
            if after is not None and reference is not None:
                rows[f"{kind.upper()} {gate}"] = HardenedGate(
                    before=counts(tables[kind][gate]),
                    after=counts(after),
                    reference=counts(reference),
                    restored=restored(after, reference),
                )
    return Hardened(rows, reading([row.restored for row in rows.values()]))


def counts(gate: GateResult) -> list[int]:
    return [gate.passes, gate.n]


def restored(after: GateResult, reference: GateResult) -> bool | None:
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
    return "not restored: the signal is destroyed; it needs more bits in the right places, or training"


def by_activations(tables: Mapping[str, GateTable]) -> str | None:
    """Return a description of the gates that only W4A4 fails, or None.

    tables: gates per numerics.
    """
    if "w4a4" not in tables or "w4a16" not in tables:
        return None
    only = [g for g in failing(tables["w4a4"]) if g not in failing(tables["w4a16"])]
    if not only:
        return None
    return f"held under W4A16: {', '.join(only)}; the loss comes from quantizing activations, not weights"
