"""Find out why a strategy failed, or why none can pass.

The models themselves answer these questions of the original plan (R46, R47):

- Does the bf16 model pass the gates? If not, it is the base model, not the fine-tune, and no quantization helps.
- Do the calibration answers belong to their questions? They are scored against the same answers, shuffled.
- Does a hardened system prompt restore the behaviour? Then the signal is there, and a lighter strategy may be enough.
- Do the weights alone cause it? Gates that pass under W4A16 and fail under W4A4 are lost to the activations.

Do the calibration answers belong to their questions? The bf16 model scores them as they are, and shuffled among the questions.

belong      the answers are far likelier with their own questions
shuffled    they are not likelier at all, although the model distinguishes these questions: its own answers are far likelier with
            their own questions
undecided   the model does not distinguish them (near-identical rows, or a model that was not fine-tuned on such rows), or the
            answers are only somewhat likelier
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from scipy.stats import wilcoxon

from annie_quant import judge
from annie_quant.cli.pipeline.stages import StageResult, Stages, silence_transformers
from annie_quant.core.progress import Progress
from annie_quant.data import Persona, load_persona
from annie_quant.data.rows import read_conversations
from annie_quant.documents import GateResult, GateTable, Hardened, HardenedGate, Labels, LabelScores
from annie_quant.judge import Case, Workload
from annie_quant.judge.decision import failing

Row = dict[str, Any]  # a conversation
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


Score = Callable[[Sequence[Row]], list[float]]  # nats per token of each row's answer
LABEL_ROWS = 48
OWN_TOKENS = 64  # of the model's own answers
# Answers that belong to their questions are far likelier under the fine-tune than the same answers shuffled. A ratio of 0.8 in
# nats per token is far from both cases (tiny-annie: 0.02 to 0.9 if they belong, 1.0 to 1.0 if they do not).
MAX_BELONGING_RATIO = 0.8
LEVEL = 0.05


class LabelsResult(StageResult):
    """Whether the calibration answers belong to their questions."""

    labels: Labels


def with_shuffled_answers(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """Return the conversations with their last answers shuffled among them; no answer stays with its own question."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    source = dict(zip(order, order[1:] + order[:1], strict=True))
    return [{**row, "messages": [*row["messages"][:-1], rows[source[i]]["messages"][-1]]} for i, row in enumerate(rows)]


def first_answers(rows: Sequence[Row]) -> list[Row]:
    """Return each conversation up to its first answer, which may be a tool call."""
    result = []
    for row in rows:
        end = next(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
        result.append({**row, "messages": row["messages"][: end + 1]})
    return result


def last_answers(rows: Sequence[Row]) -> list[Row]:
    """Return each conversation with all user messages and the last answer alone."""
    return [
        {**row, "messages": [*(m for m in row["messages"] if m["role"] in ("system", "user")), row["messages"][-1]]}
        for row in rows
    ]


def check_labels(stages: Stages) -> Labels:
    """Score the first and the last answers of the calibration data under bf16, as they are and shuffled."""

    def work(progress: Progress) -> LabelsResult:
        from annie_quant.offline.pair import EvaluationJob, open_pair

        silence_transformers()
        rows = read_conversations(stages.conversations, LABEL_ROWS)
        job = EvaluationJob(checkpoint=stages.model, reference=stages.model, cache=stages.dir / "eval")
        with open_pair(job, progress) as pair:
            labels = judge_labels(rows, lambda part: score(pair, part), lambda part: own_answers(pair, part))
        return LabelsResult(labels.verdict, labels)

    return stages.stage("labels", stages.data_inputs(), [], work, LabelsResult).labels


def judge_labels(rows: Sequence[Row], score: Score, own: Callable[[Sequence[Row]], Sequence[Row]]) -> Labels:
    """Decide from scores.

    own: the rows with the model's own first answers; only asked for where the rows do not belong.
    """
    parts = {"first": first_answers(rows), "last": last_answers(rows)}
    scores = {name: (score(part), score(with_shuffled_answers(part))) for name, part in parts.items()}
    means = {name: LabelScores(*(float(np.mean(side)) for side in pair)) for name, pair in scores.items()}
    verdict: Literal["belong", "shuffled", "undecided"] = "belong"
    if not all(far_likelier(pair) for pair in means.values()):
        verdict = "undecided"
        worst = [scores[name] for name, mean in means.items() if not far_likelier(mean)]
        if not all(likelier(*pair) for pair in worst):
            answers = own(parts["first"])
            control = LabelScores(float(np.mean(score(answers))), float(np.mean(score(with_shuffled_answers(answers)))))
            verdict = "shuffled" if far_likelier(control) else "undecided"
    return Labels(means["first"], means["last"], verdict == "belong", verdict)


def labels_note(labels: Labels, from_logs: bool) -> str | None:
    """Return what a user must know about the answers; None where they belong.

    from_logs: another model may have written them.
    """
    if labels.verdict == "belong":
        return None
    scores = "; ".join(
        f"{name} answers {part.original:.2f} nats per token as they are, {part.shuffled:.2f} shuffled"
        for name, part in (("first", labels.first), ("last", labels.last))
    )
    if labels.verdict != "shuffled":
        return f"labels undecided: the bf16 model does not distinguish these rows ({scores})"
    if from_logs:
        return (
            f"the calibration answers are not this model's ({scores}): either another model wrote the log, or answers and "
            "questions are mixed up. Calibration uses them all the same; the gates use bf16's own answers. Better: a log of "
            "this model (annie-quant record)"
        )
    return (
        f"SHUFFLED LABELS: the calibration answers do not belong to their questions ({scores}). "
        "Make the data again (annie-quant data)"
    )


def far_likelier(scores: LabelScores) -> bool:
    return scores.original < MAX_BELONGING_RATIO * scores.shuffled


def likelier(original: Sequence[float], shuffled: Sequence[float]) -> bool:
    """Return whether the answers are surely likelier with their own questions (Wilcoxon's signed-rank test, one-sided)."""
    if len(original) != len(shuffled):
        return False
    differences = np.subtract(original, shuffled)
    return bool(np.any(differences)) and wilcoxon(differences, alternative="less").pvalue < LEVEL


def score(pair: Any, rows: Sequence[Row]) -> list[float]:
    """Return the nats per token of each row's answers under the reference.

    pair: offline.pair.ModelPair.
    """
    import torch

    from annie_quant.offline.engine import Row as ScoredRow
    from annie_quant.offline.prompts import conversation_answers

    answers = [ScoredRow(answer.prompt, answer.target) for answer in conversation_answers(pair.template, rows)]
    nats: dict[int, float] = {}
    for i, logits in pair.reference.scores(answers):
        if target := answers[i].target:
            expected = torch.tensor(target, device=logits.device)
            nats[i] = float(torch.nn.functional.cross_entropy(logits.double(), expected))
    nats = pair.group.gather(nats)
    return [nats[i] for i in sorted(nats)]


def own_answers(pair: Any, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the model's own answers."""
    from annie_quant.offline.verification import message_of

    cases = tuple(
        Case(id=str(i), messages=tuple(row["messages"][:-1]), tools=tuple(row.get("tools") or ()))
        for i, row in enumerate(rows)
    )
    workload = Workload(
        name="own answers",
        description="",
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=OWN_TOKENS,
        temperature=0.0,
        gates=(),
        cases=cases,
    )
    answered = {
        a.request.case.id: pair.template.answer(a.request, a.completion)
        for a in pair.reference.answer([workload], pair.progress)
    }
    return [{**row, "messages": [*row["messages"][:-1], message_of(answered[str(i)])]} for i, row in enumerate(rows)]
