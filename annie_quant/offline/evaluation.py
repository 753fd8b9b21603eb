"""One evaluation of loaded models: gates, KL divergence and perplexity of a checkpoint compared with its bf16 reference.

prepare_evaluation   the reference answers every prompt greedily, in two arithmetics
measure_numerics     under one numerics the checkpoint is checked against those answers (answers.py), in one pass that also gives
                     the KL figures, and in the further members of the numerics (ensemble.py)
judge_measurements   gates, counts and verdicts are made from the answers, without a model (judging.py, judge/evidence.py)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from annie_quant import __version__, documents, judge
from annie_quant.checkpoint import ModelFolder, prompt_files
from annie_quant.core import files
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject, integer
from annie_quant.data.logs import Problems
from annie_quant.data.rows import Rows, read_conversations
from annie_quant.data.workloads import resolve
from annie_quant.documents.persona import Persona
from annie_quant.judge import Workload, evidence
from annie_quant.judge.decision import RULE
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.sampling import (
    compares_with_reference,
    prompts_per_gate,
    reference_notes,
    shortages,
)
from annie_quant.offline import ensemble, estimate
from annie_quant.offline.answers import AnswerOutcome
from annie_quant.offline.divergence import TokenLabels, token_labels
from annie_quant.offline.draft_diagnosis import fault_of_checkpoint
from annie_quant.offline.draft_head import has_head
from annie_quant.offline.draft_prediction import predict_drafts, spread_answers
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import DraftedAnswer
from annie_quant.offline.judging import (
    ReferenceAnswers,
    differing_answers,
    gives_one_answer,
    reference_answers,
)
from annie_quant.offline.linears import NVFP4Linear
from annie_quant.offline.loading import profiles_of
from annie_quant.offline.measured import Measurement, MeasurementStore
from annie_quant.offline.pair import EvaluationJob, ModelPair, StrPath, check_prompts, open_pair
from annie_quant.offline.profiles import choose_profiles, find_profile
from annie_quant.offline.prompts import (
    Answered,
    ScoredAnswer,
    Template,
    conversation_answers,
    rendered_workloads,
)


@dataclass(frozen=True)
class ScoredText:
    """Answers whose tokens are scored, and what the figures of these tokens are grouped by."""

    answers: list[ScoredAnswer]
    labels: TokenLabels


@dataclass(frozen=True)
class Baseline:
    """What a checkpoint is compared with, before it computes anything.

    workloads: the distinct prompts, with the gates that compare with bf16's own answers.
    answered, second: the reference's answers in its usual and in its second arithmetic.
    compares: whether the workloads themselves have gates that compare with bf16's own answers.
    own, conversations: texts that are scored: the reference's answers, and those of the job's conversations.
    numerics: names of the profiles that are measured.
    blocking: why the verdict cannot be "keeps".
    notes: what else a reader must know about how it was computed.
    """

    workloads: list[Workload]
    compares: bool
    answered: list[Answered]
    second: list[Answered]
    own: ScoredText
    conversations: ScoredText
    numerics: list[str]
    blocking: list[str]
    notes: list[str]


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
    rows: int | None = None,
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
        rows: answers per batch; default: 128, on a GPU as many as fit, up to 512.
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


def run(
    job: EvaluationJob,
    progress: Progress = SILENT,
    note: Callable[[str], object] | None = None,
) -> documents.Evaluation:
    """Evaluate a checkpoint and write the result to the job's output.

    note: gets the line that states time and memory before the work begins; None: a message of `progress`.
    """
    if job.output is not None:
        files.check_writable(job.output)  # before an hour of evaluation, not after it
    with open_pair(job, progress) as pair:
        announce(pair, note)
        result = evaluate_pair(pair, chosen_prompts(pair))
    if job.output is not None:
        files.write_json(job.output, result.to_dict())
    return result


def announce(pair: ModelPair, note: Callable[[str], object] | None = None) -> None:
    """Report how long the evaluation takes."""
    if pair.progress is SILENT:
        return
    job = pair.job
    numerics, _ = choose_profiles(job.numerics, profiles_of(pair.model))
    n_numerics = 1 if job.quick else len(numerics)
    prompts, _ = rendered_workloads(pair.template, job.prompts(job.n_per_gate))
    if prompts:
        line = estimate.estimate_line(pair, prompts, n_numerics)
        (note or pair.progress.message)(line)


def chosen_prompts(pair: ModelPair) -> list[Workload]:
    """Return the job's prompts, where it extends them as many as bf16's own answers call for."""
    job = pair.job
    chosen, _ = rendered_workloads(pair.template, job.prompts(job.n_per_gate))
    if not job.extends or job.n_per_gate is None or not compares_with_reference(chosen):
        return chosen
    per_gate = prompts_per_gate(job.n_per_gate, reference_gates(pair, chosen))
    return chosen if per_gate == job.n_per_gate else job.prompts(per_gate)


def evaluate_pair(pair: ModelPair, workloads: Sequence[Workload]) -> documents.Evaluation:
    """Evaluate the checkpoint with these workloads, whatever the job's are.

    Raises UsageError where the checkpoint supports none of the job's numerics.
    """
    baseline = prepare_evaluation(pair, workloads)
    store = MeasurementStore(pair, baseline.answered, baseline.conversations.answers)
    measurements = [
        store.measured(name, partial(measure_numerics, pair, baseline, name))
        for name in baseline.numerics
    ]
    result = judge_measurements(pair, baseline, measurements)
    store.remove()
    return result


def prepare_evaluation(pair: ModelPair, workloads: Sequence[Workload]) -> Baseline:
    """Let the reference answer, and compare the checkpoint's own prompt files with the reference's."""
    job = pair.job
    workloads, n_repeated = judge.distinct_prompts(workloads)
    workloads, refused = rendered_workloads(pair.template, workloads)
    numerics, skipped = choose_profiles(job.numerics, profiles_of(pair.model))
    numerics = numerics[:1] if job.quick else numerics
    not_scored = Problems()
    conversations = conversation_answers(pair.template, job.conversations, not_scored)
    compares = compares_with_reference(workloads)
    workloads = [
        replace(w, gates=tuple(dict.fromkeys((*w.gates, *REFERENCE_GATES)))) for w in workloads
    ]
    answered = pair.reference.answer(workloads, pair.progress)
    own_files = check_prompts(pair, answered)
    blocking = list(job.faults)
    blocking += [b for b in own_files.blocking if not any(b in fault for fault in job.faults)]
    notes = [*own_files.blocking, *own_files.notes, *model_notes(numerics, skipped, pair.model)]
    if job.quick:
        notes.append(f"quick: {numerics[0]} alone; a verdict can depend on one arithmetic")
    if n_repeated:
        notes.append(f"{n_repeated} prompts are repeated under other ids and count once")
    notes += length_notes(job.reference, answered)
    notes += cut_notes(answered)
    notes += [f"left out: {line}" for line in refused]
    notes += unanswered_notes(workloads, answered)
    notes += [f"not scored: {line}" for line in not_scored.lines()]
    notes += shortages(workloads, job.n_per_gate or 0)
    notes += template_notes(pair.template, workloads)
    for workload in workloads:
        if workload.informative:
            gates = ", ".join(workload.informative)
            notes.append(f"{workload.name}: {gates} for information only, as the workload states")
    return Baseline(
        workloads=workloads,
        compares=compares,
        answered=answered,
        second=ensemble.second_answers(pair, answered),
        own=scored_text(pair.template, pair.scored(answered)),
        conversations=scored_text(pair.template, conversations),
        numerics=numerics,
        blocking=blocking,
        notes=notes,
    )


def scored_text(template: Template, answers: list[ScoredAnswer]) -> ScoredText:
    return ScoredText(answers, token_labels(template, answers))


def measure_numerics(pair: ModelPair, baseline: Baseline, name: str) -> Measurement[AnswerOutcome]:
    """Score all tokens in one pass, then decode the answers that differ from the reference's, here and in each further member."""
    start = time.monotonic()
    answered = baseline.answered
    own = baseline.own
    conversations = baseline.conversations
    with emulate(pair.model, find_profile(name)):
        comparison = pair.compare(
            [*own.answers, *conversations.answers], f"{name}: checking answers"
        )
        compared_own, compared_conversations = comparison.split(len(answered))
        base = dict(enumerate(compared_own.choices))
        differences = ensemble.differences_of(base)
        outcomes = ensemble.member_answers(pair, pair.engine, answered, differences, name)
        own_answers = [Answered(o.request, o.completion) for o in outcomes]
        answers = drafted_answers(pair, own_answers)
        drafts = drafts_of(pair, pair.engine, pair.job.checkpoint, answers)
        if drafts:
            fault = fault_of_checkpoint(pair.engine, ModelFolder(pair.job.checkpoint), answers)
            baseline.notes.extend([f"MTP head: {fault}"] if fault else [])
    members: list[ensemble.MemberOutcomes[AnswerOutcome]] = []
    figures = None
    if pair.job.has_ensemble:
        members, figures = ensemble.further_members(pair, name, answered, base, outcomes)
    return Measurement(
        name=name,
        outcomes=outcomes,
        kl=compared_own.summary(own.labels) if own.answers else None,
        kl_conversations=compared_conversations.summary(conversations.labels)
        if conversations.answers
        else None,
        drafts=drafts,
        members=members,
        figures=figures,
        seconds=time.monotonic() - start,
    )


def judge_measurements(
    pair: ModelPair, baseline: Baseline, measurements: Sequence[Measurement[AnswerOutcome]]
) -> documents.Evaluation:
    """Return the evaluation: the outcomes of all gates, the counts and the verdict."""
    job = pair.job
    references = reference_answers(pair.template, baseline.answered)
    floor = references.outcomes(references.judge(baseline.second))
    blocking = list(baseline.blocking)
    numerics: dict[str, documents.NumericsResult] = {}
    members: dict[str, documents.Member] = {}
    figures: dict[str, documents.EnsembleFigures] = {}
    for side in measurements:
        after = references.judge(side.outcomes)
        numerics[side.name] = numerics_result(references, side, after)
        constant = gives_one_answer(references, after)
        if constant:
            blocking.append(f"{side.name}: {constant}, which bf16 does not give")
        if side.figures is not None:
            figures[side.name] = side.figures
        for member in side.members:
            outcomes = references.outcomes(references.judge(member.outcomes))
            members[member.name] = documents.Member(
                member.arithmetic, {}, {}, outcomes, member.n_computed, member.n_changed
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
                for w in baseline.workloads
            },
            n_answers=len(baseline.answered),
            n_conversation_answers=len(baseline.conversations.answers),
            n_text_tokens=0,
            notes=baseline.notes,
            reference_gates={},
            numerics=numerics,
            seconds=time.monotonic() - pair.start,
            prompts=references.prompts(),
            reference_outcomes=references.outcomes(references.judged),
            floor_outcomes={gate: row for gate, row in floor.items() if gate in REFERENCE_GATES},
            members=members,
            ensemble=figures,
            reference_drafts=reference_drafts(pair, baseline.answered),
            checkpoint_files=prompt_files.model_files(job.checkpoint),
            reference_files=pair.reference.files,
            blocking=blocking,
        )
    )
    if baseline.compares:
        evaluation.notes += reference_notes(references.judged, evaluation.reference_gates)
    evaluation.evidence_sha256 = evidence.evidence_sha256(evaluation)
    return evaluation


def numerics_result(
    references: ReferenceAnswers, side: Measurement[AnswerOutcome], after: Sequence[judge.Judged]
) -> documents.NumericsResult:
    """Return the document of one numerics without its counts. after: its answers with what judges them."""
    n_tokens = sum(len(o.completion.tokens) for o in side.outcomes)
    n_reference_tokens = sum(len(a.completion.tokens) for a in references.answered)
    kl = side.kl
    return documents.NumericsResult(
        gates={},
        paired={},
        outcomes=references.outcomes(after),
        kl=kl,
        kl_conversations=side.kl_conversations,
        kl_text=None,
        perplexity=kl.perplexity if kl else None,
        perplexity_reference=kl.perplexity_reference if kl else None,
        same_answers=documents.SameAnswers(
            n=len(side.outcomes), same=sum(o.same for o in side.outcomes)
        ),
        verbosity_ratio=n_tokens / n_reference_tokens if n_reference_tokens else None,
        cases=differing_answers(side.outcomes, after, references.judged),
        seconds=side.seconds,
        arithmetic=find_profile(side.name).describe(),
        drafts=side.drafts,
    )


def reference_drafts(
    pair: ModelPair, answered: Sequence[Answered]
) -> dict[str, documents.DraftPrediction]:
    """Return what drafts of the bf16 reference's MTP head give on its own answers."""
    if not has_head(ModelFolder(pair.job.reference)):
        return {}
    answers = drafted_answers(pair, answered)
    return drafts_of(pair, pair.reference.engine(), pair.job.reference, answers)


def drafted_answers(pair: ModelPair, answered: Sequence[Answered]) -> list[DraftedAnswer]:
    """Return a model's own answers in tokens, evenly spread over the workloads."""
    return spread_answers(
        DraftedAnswer(r.workload.name, r.prompt, tuple(pair.template.target(completion)))
        for r, completion in answered
    )


def drafts_of(
    pair: ModelPair, engine: Engine, folder: Path, answers: Sequence[DraftedAnswer]
) -> dict[str, documents.DraftPrediction]:
    """Return what drafts of a model's MTP head give by workload; empty without a head, or with one that the audit faults."""
    try:
        return predict_drafts(engine, ModelFolder(folder), answers)
    except CheckpointError as error:
        pair.progress.message(f"drafts are not predicted: {error}")
        return {}


def reference_gates(pair: ModelPair, workloads: Sequence[Workload]) -> documents.GateTable:
    """Return the gates of bf16's own answers; these are stored, so that a following evaluation does not compute them again."""
    answered = pair.reference.answer(workloads, pair.progress)
    return judge.gate_table(reference_answers(pair.template, answered).judged)


def model_notes(numerics: Sequence[str], skipped: Sequence[str], model: nn.Module) -> list[str]:
    """Return what a reader of the result must know about how it was computed."""
    lines = []
    if isinstance(model.get_output_embeddings(), NVFP4Linear):  # type: ignore[operator]
        lines.append("lm_head is quantized; the usual recipes do not quantize it")
    if skipped:
        lines.append(f"{', '.join(skipped)} does not apply: the checkpoint has no input scales")
    if any(n.endswith("-nvfp4kv") for n in (*numerics, *skipped)):
        lines.append(
            "a KV cache in NVFP4: one server's answers repeat token 0 with thinking and tools (sgl-project/sglang#36537); others "
            "serve it, so look at the answers of yours"
        )
    return lines


def length_notes(reference: Path, answered: Sequence[Answered]) -> list[str]:
    """Return a note if prompts are longer than the model's context."""
    context = integer(ModelFolder(reference).text_config.get("max_position_embeddings"))
    longest = max((len(a.request.prompt) for a in answered), default=0)
    if not context or longest <= context:
        return []
    count = sum(len(a.request.prompt) > context for a in answered)
    return [
        f"{count} prompts are longer than the model's context of {context:,} tokens (the longest {longest:,}): servers refuse them"
    ]


def unanswered_notes(workloads: Sequence[Workload], answered: Sequence[Answered]) -> list[str]:
    """Return how many later turns have no answer, because the chat template refuses bf16's own earlier ones."""
    n_answers = Counter(request.conversation for request, _ in answered)
    cases = [(w.name, c) for w in workloads for c in w.cases]
    short = [(name, c) for name, c in cases if n_answers[name, c.id] < c.n_turns]
    if not short:
        return []
    n_turns = sum(c.n_turns - n_answers[name, c.id] for name, c in short)
    reason = "the chat template refuses them after bf16's own answers"
    return [f"left out: {n_turns} later turns ({reason}, first in {short[0][0]}/{short[0][1].id})"]


def cut_notes(answered: Sequence[Answered]) -> list[str]:
    """Return a note for each workload with answers of bf16 that max_tokens cuts: which file needs which value."""
    cut: dict[str, Workload] = {}
    counts: Counter[str] = Counter()
    for request, completion in answered:
        counts[request.workload.name] += not completion.finished
        if not completion.finished:
            cut[request.workload.name] = request.workload
    lines = []
    for name, workload in cut.items():
        n_all = sum(request.workload.name == name for request, _ in answered)
        place = workload.path or f"the workload {name}"
        lines.append(
            f"{counts[name]} of {n_all} answers of bf16 to {name} are cut and test nothing: "
            f"set max_tokens to {2 * workload.max_tokens} (now {workload.max_tokens}) in {place}"
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
