"""Why a strategy failed, or why none can pass: the questions of the founding tree, asked of the models themselves.

- Does the bf16 model hold the gates? One that does not is the base model, not the fine-tune, and no quantization mends it.
- Do the calibration answers belong to their questions? Scored against the same answers dealt anew.
- Does a hardened system prompt restore the behaviour? Then the signal is there and a lighter strategy may do.
- Do the weights alone do it? What holds under W4A16 and not under W4A4 is lost to the activations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from annie_quant import judge
from annie_quant.data import Persona, load_persona
from annie_quant.pipeline.stages import Stages, failing

MANNERS = ("tool_call", "no_markdown", "thinking_leak")
BY_PROMPT = (*MANNERS, "non_empty", "stop")  # gates that a stronger prompt may restore
HARDENED_N = 40
LABEL_ROWS = 48
# Answers that belong to their questions are far likelier to the fine-tune than the same answers dealt anew: in nats a token
# 0.8 is wide of both (tiny-annie: 0.02 against 0.9 when they belong, 1.0 against 1.0 when they do not).
BELONG = 0.8


def smoke(workloads: Sequence[Any]) -> list[Any]:
    """The founding smoke test: the first question of fact ("What is the capital of Japan?") alone."""
    chosen = next((w for w in workloads if "factual" in w.gates), workloads[0])
    return [replace(chosen, cases=chosen.cases[:1])]


def reference_report(gates: Mapping[str, Any]) -> str | None:
    """What it means that bf16 itself fails gates; None when it fails none."""
    failed = failing(dict(gates), ("fail",))
    lost = [g for g in failed if g in MANNERS]
    if len(lost) >= 2 or "tool_call" in lost:
        counts = ", ".join(f"{g} {gates[g]['passes']} of {gates[g]['n']}" for g in lost)
        return (
            f"WRONG MODEL: --model itself does not have the manners ({counts}). "
            "It looks like the base model: give the fine-tuned bf16 checkpoint"
        )
    if failed:
        counts = ", ".join(f"{g} {gates[g]['passes']} of {gates[g]['n']}" for g in failed)
        return f"the bf16 model itself fails {counts}: no quantization of it can pass"
    return None


def dealt_anew(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """The conversations with their last answers dealt among them, none to its own question."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    turned = dict(zip(order, order[1:] + order[:1], strict=True))
    return [{**row, "messages": [*row["messages"][:-1], rows[turned[i]]["messages"][-1]]} for i, row in enumerate(rows)]


def first_answers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each conversation up to its first answer: what is said first to what is asked first, calls of tools included."""
    found = []
    for row in rows:
        end = next(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
        found.append({**row, "messages": row["messages"][: end + 1]})
    return found


def last_answers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the user says, all of it, and the last answer alone."""
    return [
        {**row, "messages": [*(m for m in row["messages"] if m["role"] in ("system", "user")), row["messages"][-1]]}
        for row in rows
    ]


def labels(stages: Stages, workloads: Sequence[Any]) -> dict[str, Any]:
    """For the first and the last answers: nats a token under bf16 as {"given", "dealt_anew"}; and whether they "belong"."""
    import math

    from annie_quant.data.rows import read_conversations

    rows = read_conversations(stages.conversations, LABEL_ROWS)
    found: dict[str, Any] = {}
    for which, part in (("first", first_answers(rows)), ("last", last_answers(rows))):
        found[which] = {}
        for how, text in (("given", part), ("dealt_anew", dealt_anew(part))):
            made = stages.evaluate(f"labels-{which}-{how}", stages.model, smoke(workloads), conversations=text)
            found[which][how] = math.log(made["numerics"]["bf16"]["kl_conversations"]["perplexity_reference"])
    found["belong"] = all(found[which]["given"] < BELONG * found[which]["dealt_anew"] for which in ("first", "last"))
    return found


def hardened_prompt(persona: Persona) -> str:
    """The founding hardened prompt, from a persona's own rules."""
    rules = [
        *persona.rules,
        *(["When a tool is needed, emit ONLY the tool call, with no text."] if persona.tools else []),
    ]
    numbered = "\n".join(f"{i}. {rule}" for i, rule in enumerate(rules, 1))
    return f"{persona.system_prompt}\nCRITICAL RULES (violations cause errors):\n{numbered}"


def hardened(
    stages: Stages, strategy: str, workloads: Sequence[Any], sides: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Ask again under a stronger system prompt what the failing gates judge. None where no such gate fails.

    {"gates": {"W4A4 tool_call": {"before", "after", "reference", "restored"}}, "reading"}
    """
    lost = {kind: [g for g in failing(side["gates"]) if g in BY_PROMPT] for kind, side in sides.items()}
    lost = {kind: gates for kind, gates in lost.items() if gates}
    if not lost:
        return None
    wanted = {g for gates in lost.values() for g in gates}
    plain = [w for w in workloads if wanted & set(w.gates) and w.persona and not w.system]
    asked = [replace(w, system=hardened_prompt(load_persona(str(w.persona)))) for w in judge.sample(plain, HARDENED_N)]
    if not asked:
        return None
    made = stages.evaluate(f"{strategy}-hardened", stages.checkpoint(strategy), asked, numerics=tuple(lost))
    found: dict[str, Any] = {}
    for kind, gates in lost.items():
        for gate in gates:
            after, reference = made["numerics"][kind]["gates"].get(gate), made["reference_gates"].get(gate)
            if after is None or reference is None:
                continue
            rows = {"before": sides[kind]["gates"][gate], "after": after, "reference": reference}
            counts = {k: [row["passes"], row["n"]] for k, row in rows.items()}
            found[f"{kind.upper()} {gate}"] = counts | {"restored": restored(after, reference)}
    return {"gates": found, "reading": reading([f["restored"] for f in found.values()])}


def restored(after: Mapping[str, Any], reference: Mapping[str, Any]) -> bool | None:
    """Whether a gate is well again under the hardened prompt; None where bf16 itself is not well under it."""
    if after["verdict"] != "fail" or after["passes"] * reference["n"] >= reference["passes"] * after["n"]:
        return True
    return None if reference["verdict"] == "fail" else False


def reading(restored: Sequence[bool | None]) -> str:
    """What the founding plan reads from a hardened prompt (its section 4.3)."""
    known = [r for r in restored if r is not None]
    if not known:
        return "no conclusion: bf16 itself does not hold under the hardened prompt"
    if all(known):
        return "restored: the signal is there and needs a stronger call; a lighter strategy may do"
    return "not restored: the signal is destroyed there; it needs more bits in the right places, or training"


def by_activations(sides: Mapping[str, Any]) -> str | None:
    """What only W4A4 loses."""
    if "w4a4" not in sides or "w4a16" not in sides:
        return None
    only = [g for g in failing(sides["w4a4"]["gates"]) if g not in failing(sides["w4a16"]["gates"])]
    if not only:
        return None
    return f"held under W4A16: {', '.join(only)}; the harm is done by quantizing activations, not weights"
