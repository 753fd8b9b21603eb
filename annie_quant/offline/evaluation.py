"""One evaluation of loaded models: gates, KL divergence and perplexity of a checkpoint compared with its bf16 reference.

The reference answers every prompt greedily once. The checkpoint is checked against those answers under each
numerics (answers.py), in one pass that also gives the KL figures, and in the further members of each numerics (ensemble.py).
Counts and verdicts are made from the outcomes per prompt (judge/evidence.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from annie_quant import __version__, documents, judge
from annie_quant.checkpoint import ModelFolder, prompt_files
from annie_quant.core import files
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.rows import Rows, read_conversations
from annie_quant.data.workloads import resolve
from annie_quant.documents.persona import Persona
from annie_quant.judge import Answer, Case, Judged, Workload, evidence
from annie_quant.judge.answers import constant_answer
from annie_quant.judge.decision import RULE
from annie_quant.judge.gates import GATES, IMPLIED, REFERENCE_GATES
from annie_quant.judge.pairing import deciding
from annie_quant.judge.sampling import (
    compares_with_reference,
    prompts_per_gate,
    reference_notes,
    shortages,
)
from annie_quant.offline import decoding, ensemble
from annie_quant.offline.answers import Choices, Outcome
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.linears import NVFP4Linear
from annie_quant.offline.loading import profiles_of
from annie_quant.offline.pair import EvaluationJob, ModelPair, StrPath, check_prompts, open_pair
from annie_quant.offline.profiles import choose, find_profile
from annie_quant.offline.prompts import Answered, ScoredAnswer, Template, conversation_answers


@dataclass(frozen=True)
class Baseline:
    """What the checkpoint is compared with.

    answered: the reference's answers.
    judged: the same with what judges them, each with itself as its reference.
    characters: by gate, those of `judged` in gate_outcomes.
    own, conversations: texts whose tokens are scored: the reference's answers, and those of the job's conversations.
    """

    answered: list[Answered]
    judged: list[Judged]
    characters: list[dict[str, str]]
    own: list[ScoredAnswer]
    conversations: list[ScoredAnswer]


def evaluate(
    model_dir: StrPath,
    reference_dir: StrPath,
    workloads: StrPath | Iterable[StrPath | Workload] | None = None,
    numerics: Sequence[str] = ("w4a4", "w4a16"),
    n_per_gate: int | None = None,
    conversations: Rows | None = None,
    n_conversations: int | None = None,
    cache: StrPath | None = None,
    progress: Progress | None = None,
    dtype: str | None = None,
    device: str | None = None,
    rows: int = 128,
    persona: StrPath | Persona | None = None,
    with_ensemble: bool = True,
) -> JsonObject:
    """Return gates, KL divergence and perplexity of a checkpoint under each of `numerics` that it supports.

    A model without NVFP4 linears is evaluated as it is, under the name "bf16".

    Parameters:
        model_dir: folder of the checkpoint.
        reference_dir: folder of the bf16 checkpoint that it was made from.
        workloads: Workload objects, names, JSON files or folders; default: those of the persona, else Annie's.
        persona: a name, a JSON file or a folder from `annie-quant init`; its system prompt and tools are used (data/workloads.py).
        n_per_gate: number of prompts per gate, drawn from the workloads; default: all.
        conversations: a JSON-lines file, or rows, whose assistant tokens are scored in addition to the reference's answers.
        n_conversations: most conversations, taken evenly over the rows.
        cache: folder for the reference's answers; default: annie_quant in XDG_CACHE_HOME.
        dtype: "float32" or "bfloat16" for everything that is not packed; default: float32 on a CPU if memory allows.
        rows: answers per batch.
        with_ensemble: also compute the further members of each numerics (ensemble.py), for a verdict that does not hang on one
            arithmetic.

    Returns:
        The Evaluation document as a dict that JSON can hold: `numerics` has one entry per numerics, with gates, kl,
        perplexity, paired and cases.

    Raises:
        UsageError: a workload has a temperature, or the checkpoint supports none of `numerics`.
    """
    job = EvaluationJob(
        checkpoint=Path(model_dir),
        reference=Path(reference_dir),
        workloads=resolve(persona, workloads),
        n_per_gate=n_per_gate,
        numerics=numerics,
        ensemble=with_ensemble,
        conversations=()
        if conversations is None
        else read_conversations(conversations, n_conversations),
        cache=None if cache is None else Path(cache),
        dtype=dtype,
        device=device,
        rows=rows,
    )
    return run(job.audited(), progress or SILENT).to_dict()


def run(job: EvaluationJob, progress: Progress = SILENT) -> documents.Evaluation:
    """Evaluate a checkpoint and write the result to the job's output."""
    if job.output is not None:
        files.check_writable(job.output)  # before an hour of evaluation, not after it
    with open_pair(job, progress) as pair:
        result = evaluate_pair(pair, chosen_prompts(pair))
    if job.output is not None:
        files.write_json(job.output, result.to_dict())
    return result


def chosen_prompts(pair: ModelPair) -> list[Workload]:
    """Return the job's prompts, where it extends them as many as bf16's own answers call for."""
    job = pair.job
    chosen = job.prompts(job.n_per_gate)
    if not job.extends or job.n_per_gate is None or not compares_with_reference(chosen):
        return chosen
    per_gate = prompts_per_gate(job.n_per_gate, reference_gates(pair, chosen))
    return chosen if per_gate == job.n_per_gate else job.prompts(per_gate)


def evaluate_pair(pair: ModelPair, workloads: Sequence[Workload]) -> documents.Evaluation:
    """Evaluate the checkpoint with these workloads, whatever the job's are.

    Raises UsageError where the checkpoint supports none of the job's numerics.
    """
    job = pair.job
    workloads, n_repeated = judge.distinct_prompts(workloads)
    numerics, skipped = choose(job.numerics, profiles_of(pair.model))
    conversations = conversation_answers(pair.template, job.conversations)
    own_gates = compares_with_reference(workloads)
    workloads = [
        replace(w, gates=tuple(dict.fromkeys((*w.gates, *REFERENCE_GATES)))) for w in workloads
    ]
    answered = pair.reference.answer(workloads, pair.progress)
    own_files = check_prompts(pair, answered)
    blocking = [
        *job.faults,
        *(line for line in own_files.blocking if not any(line in fault for fault in job.faults)),
    ]
    before = with_references(judged(pair.template, answered))
    characters = [gate_characters(*row) for row in before]
    baseline = Baseline(answered, before, characters, pair.scored(answered), conversations)
    floor = judged_outcomes(pair.template, ensemble.second_answers(pair, answered), baseline)
    results: dict[str, documents.NumericsResult] = {}
    members: dict[str, documents.Member] = {}
    figures: dict[str, documents.EnsembleFigures] = {}
    for name in numerics:
        results[name], outcomes, base = evaluate_numerics(pair, baseline, name)
        if constant := gives_one_answer(pair.template, baseline, outcomes):
            blocking.append(f"{name}: {constant}, which bf16 does not give")
        if job.ensemble:
            further, figures[name] = ensemble.run(pair, name, answered, base, outcomes)
            for m in further:
                after = gate_outcomes(
                    judged_outcomes(pair.template, m.outcomes, baseline), baseline
                )[1]
                members[m.name] = documents.Member(
                    m.arithmetic, {}, {}, after, m.n_computed, m.n_changed
                )
    prompts, reference_outcomes = gate_outcomes(before, baseline)
    floor_outcomes = {
        k: v for k, v in gate_outcomes(floor, baseline)[1].items() if k in REFERENCE_GATES
    }
    left_out = template_notes(pair.template, workloads)
    notes = [*own_files.blocking, *own_files.notes, *model_notes(numerics, skipped, pair.model)]
    if n_repeated:
        notes.append(f"{n_repeated} prompts are repeated under other ids and count once")
    notes += [*shortages(workloads, job.n_per_gate or 0), *left_out]
    for w in workloads:
        if w.informative:
            notes.append(
                f"{w.name}: {', '.join(w.informative)} for information only, as the workload states"
            )
    evaluation = evidence.recounted(
        documents.Evaluation(
            schema_version=documents.SCHEMA_VERSION,
            rule=RULE,
            version=__version__,
            model=str(job.checkpoint),
            reference=str(job.reference),
            reference_sha256=pair.reference.files.sha256,
            dtype=pair.dtype,
            device=pair.engine.device.type,
            workloads={
                w.name: documents.EvaluatedWorkload(w.sha256, len(w.cases), judge.prompts_sha256(w))
                for w in workloads
            },
            n_answers=len(answered),
            n_conversation_answers=len(conversations),
            n_text_tokens=0,
            notes=notes,
            reference_gates={},
            numerics=results,
            seconds=time.monotonic() - pair.start,
            prompts=prompts,
            reference_outcomes=reference_outcomes,
            floor_outcomes=floor_outcomes,
            members=members,
            ensemble=figures,
            reference_drafts=reference_drafts(pair, answered),
            checkpoint_files=prompt_files.model_files(job.checkpoint),
            reference_files=pair.reference.files,
            blocking=blocking,
        )
    )
    if own_gates:
        evaluation.notes += reference_notes(before, evaluation.reference_gates)
    evaluation.evidence_sha256 = evidence.evidence_sha256(evaluation)
    return evaluation


def evaluate_numerics(
    pair: ModelPair, baseline: Baseline, name: str
) -> tuple[documents.NumericsResult, list[Outcome], dict[int, Choices]]:
    """Score all tokens in one pass, then decode the answers that differ from the reference's.

    Returns the document without its counts, the answers, and the choices of tokens by the answer's index.
    """
    start = time.monotonic()
    profile = find_profile(name)
    answered, own, conversations = baseline.answered, baseline.own, baseline.conversations
    with emulate(pair.model, profile):
        comparisons = pair.compare([*own, *conversations], f"{name}: checking answers")
        base = {i: comparisons[i].choices for i in range(len(answered))}
        differences = ensemble.differences_of(base)
        outcomes = ensemble.answers_of(pair, pair.engine, answered, differences, name)
        drafts = drafts_of(
            pair,
            pair.engine,
            pair.job.checkpoint,
            [Answered(o.request, o.completion) for o in outcomes],
        )
    kl = pair.summarize(own, comparisons)
    after = judged_outcomes(pair.template, outcomes, baseline)
    n_tokens = sum(len(o.completion.tokens) for o in outcomes)
    n_reference_tokens = sum(len(completion.tokens) for _, completion in answered)
    result = documents.NumericsResult(
        gates={},
        paired={},
        outcomes=gate_outcomes(after, baseline)[1],
        kl=kl,
        kl_conversations=pair.summarize(conversations, comparisons, len(own)),
        kl_text=None,
        perplexity=kl.perplexity if kl else None,
        perplexity_reference=kl.perplexity_reference if kl else None,
        same_answers=documents.SameAnswers(n=len(outcomes), same=sum(o.same for o in outcomes)),
        verbosity_ratio=n_tokens / n_reference_tokens if n_reference_tokens else None,
        cases=differing_answers(outcomes, after, baseline.judged),
        seconds=time.monotonic() - start,
        arithmetic=profile.describe(),
        drafts=drafts,
    )
    return result, outcomes, base


def gives_one_answer(template: Template, baseline: Baseline, outcomes: Sequence[Outcome]) -> str:
    """Return how many prompts the checkpoint gives one answer to where the reference does not, or ""."""
    pairs = zip(outcomes, baseline.judged, strict=True)
    # Labels judge the others.
    rows = [(outcome, row.answer) for outcome, row in pairs if not row.case.expect]
    own = [template.answer(o.request, o.completion) for o, _ in rows]
    return constant_answer(own, [answer for _, answer in rows])


def reference_drafts(
    pair: ModelPair, answered: Sequence[Answered]
) -> dict[str, documents.DraftAcceptance]:
    """Return the acceptance of the bf16 reference's MTP head on its own answers."""
    if not decoding.has_head(ModelFolder(pair.job.reference)):
        return {}
    return drafts_of(pair, pair.reference.engine(), pair.job.reference, answered)


def drafts_of(
    pair: ModelPair, engine: Engine, folder: Path, answered: Sequence[Answered]
) -> dict[str, documents.DraftAcceptance]:
    """Return the acceptance of a model's MTP head by workload; empty without a head, or with one that the audit faults."""
    answers = [
        decoding.Drafted(r.workload.name, r.prompt, tuple(pair.template.target(completion)))
        for r, completion in answered
    ]
    try:
        return decoding.draft_acceptance(engine, ModelFolder(folder), answers)
    except CheckpointError as error:
        pair.progress.message(f"the MTP head is not measured: {error}")
        return {}


def reference_gates(pair: ModelPair, workloads: Sequence[Workload]) -> documents.GateTable:
    """Return the gates of bf16's own answers; these are stored, so that a following evaluation does not compute them again."""
    answered = pair.reference.answer(workloads, pair.progress)
    return judge.gate_table(with_references(judged(pair.template, answered)))


def with_references(judged_answers: Sequence[Judged]) -> list[Judged]:
    """Return the bf16 model's answers, each with itself as its reference, so that it passes every gate that compares."""
    return [row._replace(reference=row.answer) for row in judged_answers]


def judged_outcomes(
    template: Template, outcomes: Sequence[Outcome | Answered], baseline: Baseline
) -> list[Judged]:
    """Return answers of a checkpoint, or of the reference in another arithmetic, each with the reference's to the same prompt.

    An answer that equals the reference's, to the same request, is the reference's.
    """
    rows: list[Judged] = []
    for outcome, (request, completion), old in zip(
        outcomes, baseline.answered, baseline.judged, strict=True
    ):
        if outcome.request is request and outcome.completion == completion:
            rows.append(old)
            continue
        [row] = judged(template, [Answered(outcome.request, outcome.completion)])
        rows.append(row._replace(reference=old.reference))
    return rows


def gate_outcomes(
    judged_answers: Sequence[Judged], baseline: Baseline
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return by gate the names of its workloads' prompts, and one character for each: "1" where the answer passes, else "0".

    "-": the gate does not apply to the answer. "p", "f": it passes or fails, and does not count for the verdict, because the
    answer is not complete or by the workload's choice. All counts and the verdict can be made from them (judge/evidence.py).
    """
    prompts: dict[str, list[str]] = {}
    outcomes: dict[str, list[str]] = {}
    rows = zip(judged_answers, baseline.judged, baseline.characters, baseline.answered, strict=True)
    for row, old, of_old, (request, _) in rows:
        for gate, character in (of_old if row is old else gate_characters(*row)).items():
            prompts.setdefault(gate, []).append(request.name)
            outcomes.setdefault(gate, []).append(character)
    return prompts, {gate: "".join(characters) for gate, characters in outcomes.items()}


def gate_characters(
    workload: Workload, case: Case, answer: Answer, reference: Answer | None
) -> dict[str, str]:
    """Return the character of gate_outcomes for each gate of the workload."""
    checks = judge.checks(answer, case, workload, reference)
    counting = deciding(checks, answer, workload)
    return {
        gate: str(int(checks[gate]))
        if gate in counting
        else "fp"[checks[gate]]
        if gate in checks
        else "-"
        for gate in dict.fromkeys((*workload.gates, *IMPLIED))
    }


def judged(template: Template, answered: Sequence[Answered]) -> list[Judged]:
    """Return answers with the workload and the case, at their turn, that judge them."""
    return [Judged(r.workload, r.case.at_turn(r.turn), template.answer(r, c)) for r, c in answered]


def differing_answers(
    outcomes: Sequence[Outcome], after: Sequence[Judged], before: Sequence[Judged]
) -> list[documents.DifferingAnswer]:
    """Return the answers that differ from the reference's, with both texts and the gates that now fail."""
    return [
        documents.DifferingAnswer(
            case=outcome.request.name,
            agreed_tokens=outcome.agreed,
            failed=[
                g
                for g, ok in judge.checks(answer, case, workload, reference).items()
                if not (ok or GATES[g].two_sided)
            ],
            text=answer.text,
            tool_calls=calls_as_text(answer),
            reference_text=old.text,
            reference_tool_calls=calls_as_text(old),
        )
        for outcome, (workload, case, answer, reference), (_, _, old, _) in zip(
            outcomes, after, before, strict=True
        )
        if not outcome.same
    ]


def calls_as_text(answer: Answer) -> list[str]:
    return [f"{c['name']}({c['arguments']})" for c in answer.tool_calls]


def model_notes(numerics: Sequence[str], skipped: Sequence[str], model: nn.Module) -> list[str]:
    """Return what a reader of the result must know about how it was computed."""
    lines = []
    if isinstance(model.get_output_embeddings(), NVFP4Linear):  # type: ignore[operator]
        lines.append("lm_head is quantized; the usual recipes do not quantize it")
    if skipped:
        lines.append(f"{', '.join(skipped)} does not apply: the checkpoint has no input scales")
    if any(n.endswith("-nvfp4kv") for n in (*numerics, *skipped)):
        lines.append(
            "a KV cache in NVFP4 is known to loop at token 0 with thinking and tools; serve with FP8"
        )
    return lines


def template_notes(template: Template, workloads: Sequence[Workload]) -> list[str]:
    """Return a note if the chat template leaves out the tools that are offered."""
    offered = next((t for w in workloads for c in w.cases[:1] if (t := w.tools_for(c))), None)
    message = [{"role": "user", "content": "?"}]
    if offered is None or template.render(message, offered, False) != template.render(
        message, None, False
    ):
        return []
    return [
        "the chat template leaves out the tools: the model never sees them, and nothing about tools can be judged"
    ]
