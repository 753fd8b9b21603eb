"""Evaluating a checkpoint without a server: gates, KL divergence and perplexity compared with its bf16 reference.

The reference answers every prompt greedily once (cached on disk). The checkpoint is then checked against those answers under
W4A4 and W4A16 numerics (verification.py), in one pass that also gives the KL figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from annie_quant import __version__, judge
from annie_quant.checkpoint import ModelFolder, prompt_files
from annie_quant.checkpoint.inspection import export_notes
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import Progress
from annie_quant.data.resolve import resolve
from annie_quant.data.rows import read_conversations
from annie_quant.documents import (
    SCHEMA_VERSION,
    DifferingAnswer,
    DraftAcceptance,
    EnsembleFigures,
    EvaluatedWorkload,
    Evaluation,
    GateTable,
    Member,
    NumericsResult,
    SameAnswers,
)
from annie_quant.documents.persona import Persona
from annie_quant.judge import Answer, Case, Workload, evidence
from annie_quant.judge.answers import constant_answer
from annie_quant.judge.decision import RULE
from annie_quant.judge.gates import GATES, IMPLIED, REFERENCE_GATES
from annie_quant.judge.not_lost import compares_with_reference, reference_notes
from annie_quant.judge.pairing import deciding_checks, shortages
from annie_quant.offline import draft_head, ensemble
from annie_quant.offline.decoding import Completion
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.ensemble import MemberOutcomes
from annie_quant.offline.loading import profiles_of
from annie_quant.offline.nvfp4_linear import NVFP4Linear
from annie_quant.offline.pair import ModelPair, StrPath, check_prompts
from annie_quant.offline.profiles import find_profile, is_supported
from annie_quant.offline.prompts import Answered, ScoredAnswer, Template, conversation_answers, text_pieces
from annie_quant.offline.reference import model_sha256
from annie_quant.offline.verification import Choices, Outcome

Workloads = StrPath | Iterable[StrPath | Workload] | None
Judged = tuple[Workload, Case, Answer]  # what judge.gate_table counts


def evaluate(
    model_dir: StrPath,
    reference_dir: StrPath,
    workloads: Workloads = None,
    numerics: Sequence[str] = ("w4a4", "w4a16"),
    n_per_gate: int | None = None,
    conversations: StrPath | Sequence[dict[str, Any]] | None = None,
    n_conversations: int | None = None,
    cache: StrPath | None = None,
    progress: Progress | None = None,
    dtype: str | None = None,
    device: str | None = None,
    rows: int = 128,
    text: StrPath | None = None,
    persona: StrPath | Persona | None = None,
    with_ensemble: bool = True,
) -> dict[str, Any]:
    """Return gates, KL divergence and perplexity of a checkpoint under each of `numerics` that it supports.

    A model without NVFP4 linears is evaluated as it is, under the name "bf16". Under torchrun or accelerate launch every
    process calls this with the same arguments, computes its share and gets the whole result.

    Parameters:
        model_dir: folder of the checkpoint.
        reference_dir: folder of the bf16 checkpoint that it was made from.
        workloads: Workload objects, names, JSON files or folders; default: those of the persona, else Annie's.
        persona: a name, a JSON file or a folder from `annie-quant init`; its system prompt and tools are used (data/resolve.py).
        n_per_gate: number of prompts per gate, drawn from the workloads; default: all.
        conversations: a JSON-lines file, or rows, whose assistant tokens are scored in addition to the reference's answers.
        n_conversations: most conversations, taken evenly over the file.
        cache: folder for the reference's answers; default: annie_quant in XDG_CACHE_HOME.
        dtype: "float32" or "bfloat16" for everything that is not packed; default: float32 on a CPU if memory allows.
        rows: answers per batch.
        text: a plain text file for perplexity and KL over all of its tokens.
        with_ensemble: also compute the further members of each numerics (ensemble.py), for a verdict that does not hang on one
            arithmetic.

    Returns:
        The Evaluation document as a dict that JSON can hold: `numerics` has one entry per numerics, with gates, kl,
        perplexity, paired and cases.

    Raises:
        UsageError: a workload has a temperature, or the checkpoint supports none of `numerics`.
    """
    chosen = choose_workloads(workloads, n_per_gate, persona)
    faults = export_notes(model_dir, reference_dir)
    with ModelPair(
        model_dir, reference_dir, cache=cache, dtype=dtype, device=device, rows=rows, progress=progress
    ) as pair:
        result = evaluate_pair(
            pair, chosen, numerics, conversations, n_conversations, text, with_ensemble, faults=faults, n=n_per_gate
        )
    return result.to_dict()


def choose_workloads(
    workloads: Workloads, n_per_gate: int | None, persona: StrPath | Persona | None = None
) -> list[Workload]:
    """Return the workloads that resolve() returns, sampled down to n_per_gate prompts per gate.

    Raises UsageError for a temperature > 0.
    """
    chosen, _ = judge.distinct_prompts(resolve(persona, workloads))
    if n_per_gate is not None:
        chosen = judge.sample(chosen, n_per_gate)
    for workload in chosen:
        if workload.temperature != 0:
            raise UsageError(
                f"workload {workload.name} has temperature {workload.temperature}; "
                "only greedy answers (temperature 0) can be verified offline"
            )
    return chosen


def evaluate_pair(
    pair: ModelPair,
    workloads: Sequence[Workload],
    numerics: Sequence[str] = ("w4a4", "w4a16"),
    conversations: StrPath | Sequence[dict[str, Any]] | None = None,
    n_conversations: int | None = None,
    text: StrPath | None = None,
    with_ensemble: bool = True,
    on_outcomes: Callable[[str, list[Completion]], None] = lambda member, completions: None,
    faults: Sequence[str] = (),
    n: int | None = None,
) -> Evaluation:
    """evaluate for models that are loaded already; the same parameters.

    on_outcomes: called with each member's name and its answers to all prompts. faults: of the export, which forbid "keeps".
    n: prompts per gate that were requested; a note names the gates with fewer.
    """
    workloads, n_repeated = judge.distinct_prompts(workloads)
    for name in numerics:
        find_profile(name)  # a misspelled one is an error, one that the checkpoint lacks is a note
    supported = profiles_of(pair.model)
    chosen = supported if supported == ["bf16"] else [n for n in dict.fromkeys(numerics) if is_supported(n, supported)]
    if not chosen:
        raise UsageError(
            f"{pair.model_dir} does not support {', '.join(numerics)}", f"it supports: {', '.join(supported)}"
        )
    conversation_part: list[ScoredAnswer] = []  # files first: a faulty one is reported before an hour of answers
    if conversations is not None:
        conversation_part = conversation_answers(pair.template, read_rows_of(conversations, n_conversations))
    text_part = [] if text is None else text_pieces(pair.template, text)
    own_gates = compares_with_reference(workloads)
    workloads = [replace(w, gates=tuple(dict.fromkeys((*w.gates, *REFERENCE_GATES)))) for w in workloads]
    answered = pair.reference.answer(workloads, pair.progress)
    own_files = check_prompts(pair.model_dir, pair.reference_dir, pair.template, answered)
    blocking = [*faults, *(line for line in own_files.blocking if not any(line in fault for fault in faults))]
    before = with_references(judged(pair.template, answered))
    reference_gates = judge.gate_table(before)
    second = ensemble.second_answers(pair, answered)
    floor = with_references(judged(pair.template, second), before)
    results: dict[str, NumericsResult] = {}
    members: dict[str, Member] = {}
    figures: dict[str, EnsembleFigures] = {}
    for name in chosen:
        results[name], outcomes, base = evaluate_numerics(
            pair, name, answered, before, floor, conversation_part, text_part
        )
        on_outcomes(name, [o.completion for o in outcomes])
        rows = [
            (o, a) for o, (_, c, a) in zip(outcomes, before, strict=True) if not c.expect
        ]  # labels judge the others
        own = [pair.template.answer(o.request, o.completion) for o, _ in rows]
        if constant := constant_answer(own, [answer for _, answer in rows]):
            blocking.append(f"{name}: {constant}, which bf16 does not give")
        if with_ensemble:
            further, figures[name] = ensemble.run(pair, name, find_profile(name), answered, base, outcomes)
            for m in further:
                on_outcomes(m.name, [o.completion for o in m.outcomes])
                members[m.name] = member_of(pair, m, answered, before, floor)
    prompts, reference_outcomes = gate_outcomes(before, answered)
    evaluation = Evaluation(
        schema_version=SCHEMA_VERSION,
        rule=RULE,
        version=__version__,
        model=str(pair.model_dir),
        reference=str(pair.reference_dir),
        reference_sha256=pair.reference.sha256,
        dtype=pair.dtype,
        device=pair.engine.device.type,
        workloads={w.name: EvaluatedWorkload(w.sha256, len(w.cases), judge.prompts_sha256(w)) for w in workloads},
        n_answers=len(answered),
        n_conversation_answers=len(conversation_part),
        n_text_tokens=sum(len(p.target) for p in text_part),
        notes=own_files.blocking
        + own_files.notes
        + notes(numerics, supported, pair.model)
        + ([f"{n_repeated} prompts are repeated under other ids and count once"] if n_repeated else [])
        + list(shortages(workloads, n or 0))
        + template_notes(pair.template, workloads)
        + [
            f"{w.name}: {', '.join(w.informative)} for information only, as the workload states"
            for w in workloads
            if w.informative
        ]
        + (reference_notes(before, reference_gates) if own_gates else []),
        reference_gates=reference_gates,
        numerics=results,
        seconds=time.monotonic() - pair.start,
        prompts=prompts,
        reference_outcomes=reference_outcomes,
        floor_outcomes={k: v for k, v in gate_outcomes(floor, answered)[1].items() if k in REFERENCE_GATES},
        members=members,
        ensemble=figures,
        reference_drafts=reference_drafts(pair, answered),
        checkpoint_files=prompt_files.model_files(pair.model_dir, model_sha256(pair.model_dir)),
        reference_files=prompt_files.model_files(pair.reference_dir, pair.reference.sha256),
        blocking=blocking,
    )
    evaluation.evidence_sha256 = evidence.evidence_sha256(evaluation)
    return judge.judge_evaluation(evaluation)


def evaluate_numerics(
    pair: ModelPair,
    name: str,
    answered: Sequence[Answered],
    before: Sequence[Judged],
    floor: Sequence[Judged],
    conversations: Sequence[ScoredAnswer],
    text: Sequence[ScoredAnswer],
) -> tuple[NumericsResult, list[Outcome], dict[int, Choices]]:
    """Score all tokens in one pass, then decode the answers that differ from the reference's.

    before, floor: the reference's answers in its usual arithmetic and in a second one, as with_references returns them.
    """
    start = time.monotonic()
    profile = find_profile(name)
    own = pair.scored(answered)
    with emulate(pair.model, profile):
        comparisons = pair.compare([*own, *conversations, *text], f"{name}: checking answers")
        base = {i: comparisons[i].choices for i in range(len(answered))}
        differences = ensemble.differences_of(base)
        outcomes = ensemble.answers_of(pair, pair.engine, answered, differences, name)
        drafts = drafts_of(pair, pair.engine, pair.model_dir, [Answered(o.request, o.completion) for o in outcomes])
    kl = pair.summarize(own, comparisons)
    after = judged_outcomes(pair.template, outcomes, answered, before)
    n_tokens = sum(len(o.completion.tokens) for o in outcomes)
    n_reference_tokens = sum(len(completion.tokens) for _, completion in answered)
    result = NumericsResult(
        **counted(before, after, floor, answered),
        kl=kl,
        kl_conversations=pair.summarize(conversations, comparisons, len(own)),
        kl_text=pair.summarize(text, comparisons, len(own) + len(conversations)),
        perplexity=kl.perplexity if kl else None,
        perplexity_reference=kl.perplexity_reference if kl else None,
        same_answers=SameAnswers(n=len(outcomes), same=sum(o.same for o in outcomes)),
        verbosity_ratio=n_tokens / n_reference_tokens if n_reference_tokens else None,
        cases=differing_answers(outcomes, after, before),
        seconds=time.monotonic() - start,
        arithmetic=profile.describe(),
        drafts=drafts,
    )
    return result, outcomes, base


def counted(
    before: Sequence[Judged], after: Sequence[Judged], floor: Sequence[Judged], answered: Sequence[Answered]
) -> dict[str, Any]:
    """Return what an arithmetic's answers give: its gates, paired with the reference's, and their outcomes."""
    paired, pooled = judge.pair_answers(before, after, floor)
    outcomes = gate_outcomes(after, answered)[1]
    return {"gates": judge.gate_table(after), "paired": paired, "pooled": pooled, "outcomes": outcomes}


def reference_drafts(pair: ModelPair, answered: Sequence[Answered]) -> dict[str, DraftAcceptance]:
    """Return the acceptance of the bf16 reference's MTP head on its own answers."""
    if not draft_head.has_head(ModelFolder(pair.reference_dir)):
        return {}
    return drafts_of(pair, pair.reference.engine(), pair.reference_dir, answered)


def drafts_of(
    pair: ModelPair, engine: Engine, folder: Path, answered: Sequence[Answered]
) -> dict[str, DraftAcceptance]:
    """Return the acceptance of a model's MTP head by workload; empty without a head, or with one that the audit faults."""
    answers = [
        draft_head.Drafted(r.workload.name, r.prompt, tuple(pair.template.target(completion)))
        for r, completion in answered
    ]
    try:
        return draft_head.acceptance(engine, ModelFolder(folder), answers)
    except CheckpointError as error:
        pair.progress.message(f"the MTP head is not measured: {error}")
        return {}


def member_of(
    pair: ModelPair,
    member: MemberOutcomes,
    answered: Sequence[Answered],
    before: Sequence[Judged],
    floor: Sequence[Judged],
) -> Member:
    """Return the document of a further member."""
    after = judged_outcomes(pair.template, member.outcomes, answered, before)
    counts = counted(before, after, floor, answered)
    return Member(**counts, arithmetic=member.arithmetic, n_computed=member.n_computed, n_changed=member.n_changed)


def reference_gates(pair: ModelPair, workloads: Sequence[Workload]) -> GateTable:
    """Return the gates of bf16's own answers; these are stored, so that a following evaluation does not compute them again."""
    return judge.gate_table(with_references(judged(pair.template, pair.reference.answer(workloads, pair.progress))))


def with_references(judged_answers: Sequence[Judged], references: Sequence[Judged] | None = None) -> list[Judged]:
    """Return the bf16 model's answers, each with its reference; default: itself, so that it passes every gate that compares."""
    return [
        (workload, replace(case, reference=reference), answer)
        for (workload, case, answer), (_, _, reference) in zip(
            judged_answers, references or judged_answers, strict=True
        )
    ]


def judged_outcomes(
    template: Template, outcomes: Sequence[Outcome], answered: Sequence[Answered], before: Sequence[Judged]
) -> list[Judged]:
    """Return a checkpoint's answers, each with the bf16 model's answer to the same prompt as its reference.

    answered, before: the bf16 model's. An equal answer to the same request is that of `before`, which is judged already.
    """
    rows: list[Judged] = []
    for outcome, (request, completion), old in zip(outcomes, answered, before, strict=True):
        if outcome.request is request and outcome.completion == completion:
            rows.append(old)
            continue
        [(workload, case, answer)] = judged(template, [Answered(outcome.request, outcome.completion)])
        rows.append((workload, replace(case, reference=old[1].reference), answer))
    return rows


def gate_outcomes(
    judged_answers: Sequence[Judged], answered: Sequence[Answered]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return by gate the names of its workloads' prompts, and one character for each: "1" where the answer passes, else "0".

    "-": the gate does not apply to the answer. "p", "f": it passes or fails, and does not count for the verdict, because the
    answer is not complete or by the workload's choice. All counts and the verdict can be made from them (judge/evidence.py).
    """
    prompts: dict[str, list[str]] = {}
    outcomes: dict[str, list[str]] = {}
    for (workload, case, answer), (request, _) in zip(judged_answers, answered, strict=True):
        checks, deciding = judge.checks(answer, case, workload), deciding_checks(answer, case, workload)
        for gate in dict.fromkeys((*workload.gates, *IMPLIED)):
            prompts.setdefault(gate, []).append(request.name)
            counts = str(int(checks[gate])) if gate in deciding else "fp"[checks[gate]] if gate in checks else "-"
            outcomes.setdefault(gate, []).append(counts)
    return prompts, {gate: "".join(characters) for gate, characters in outcomes.items()}


def judged(template: Template, answered: Sequence[Answered]) -> list[Judged]:
    return [(r.workload, r.case.at_turn(r.turn), template.answer(r, c)) for r, c in answered]


def differing_answers(
    outcomes: Sequence[Outcome], after: Sequence[Judged], before: Sequence[Judged]
) -> list[DifferingAnswer]:
    """Return the answers that differ from the reference's, with both texts and the gates that now fail."""
    rows = []
    for outcome, (workload, case, answer), (_, _, old) in zip(outcomes, after, before, strict=True):
        if not outcome.same:
            rows.append(
                DifferingAnswer(
                    case=outcome.request.name,
                    agreed_tokens=outcome.agreed,
                    failed=[
                        gate
                        for gate, passed in judge.checks(answer, case, workload).items()
                        if not passed and not GATES[gate].two_sided
                    ],
                    text=answer.text,
                    tool_calls=calls_as_text(answer),
                    reference_text=old.text,
                    reference_tool_calls=calls_as_text(old),
                )
            )
    return rows


def calls_as_text(answer: Answer) -> list[str]:
    return [f"{c['name']}({c['arguments']})" for c in answer.tool_calls]


def notes(requested: Sequence[str], supported: Sequence[str], model: nn.Module) -> list[str]:
    """Return what a reader of the result must know about how it was computed."""
    lines = []
    if isinstance(model.get_output_embeddings(), NVFP4Linear):  # type: ignore[operator]
        lines.append("lm_head is quantized; the usual recipes do not quantize it")
    skipped = [n for n in requested if not is_supported(n, supported)]
    if skipped and list(supported) != ["bf16"]:
        lines.append(f"{', '.join(skipped)} does not apply: the checkpoint has no input scales")
    if any(n.endswith("-nvfp4kv") for n in requested):
        lines.append("a KV cache in NVFP4 is known to loop at token 0 with thinking and tools; serve with FP8")
    return lines


def template_notes(template: Template, workloads: Sequence[Workload]) -> list[str]:
    """Return a note if the chat template leaves out the tools that are offered."""
    offered = next((t for w in workloads for c in w.cases[:1] if (t := w.tools_for(c))), None)
    if offered is None:
        return []
    message = [{"role": "user", "content": "?"}]
    if template.render(message, offered, False) != template.render(message, None, False):
        return []
    return ["the chat template leaves out the tools: the model never sees them, and nothing about tools can be judged"]


def read_rows_of(conversations: StrPath | Sequence[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    if isinstance(conversations, (str, os.PathLike)):
        return read_conversations(conversations, limit)
    return list(conversations)[:limit]
