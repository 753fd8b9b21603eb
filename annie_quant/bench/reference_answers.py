"""The gates of a benchmark's answers, and those that compare them with bf16's answers to the same prompts (`same_tool`, ...).

The bf16 answers are those of the run's reference, or of an earlier run that had one (`bench --reference-run`). The
order of requests is random, so bf16 may answer a prompt after the side that is compared with it: the checks are made when the
answers are there, and stored in records.jsonl with the others.

A turn of a conversation is compared only where the earlier answers are the same, because these are part of its prompt. Where
bf16's repeats of one prompt differ in a gate, the prompt does not count for that gate: the server does not agree with itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from annie_quant import documents, judge
from annie_quant.bench.cliffs import PREFIX as LADDER
from annie_quant.bench.run_folder import complete_workload, read_records, write_records
from annie_quant.core.errors import UsageError
from annie_quant.documents import Answer, Judgement, RequestRecord, SentWorkload, ToolCall
from annie_quant.judge import decision
from annie_quant.judge.checks.calls import arguments_of, normalized_call
from annie_quant.judge.checks.text import garbled, repeats
from annie_quant.judge.gates import GATES, REFERENCE_GATES
from annie_quant.judge.tool_eval import GATE, Played
from annie_quant.judge.workloads import Case, Workload

STORED = "reference.jsonl"  # bf16's records of an earlier run, in the run directory
RECORDED = "bf16 (recorded)"  # how results name these answers
Cases = dict[tuple[str, str], tuple[Workload, Case]]
Key = tuple[str, str, int, str]  # workload, case, turn, earlier answers


def judge_record(record: RequestRecord, case: Case, workload: Workload) -> None:
    """Set the judgement of a record. An answer that is not complete fails each gate that applies to the case."""
    faults = judge.faults(record.answer, case.at_turn(record.turn), workload)
    reason = record.answer.fault
    if reason:
        for gate, fault in faults.items():
            # A rule about the text, not a rate, applies to every answer.
            is_rule = GATES[gate].basis == "rule" and not GATES[gate].two_sided
            if fault is not None or is_rule:
                faults[gate] = fault or reason
    checks = {gate: not fault for gate, fault in faults.items() if fault is not None}
    described = {g: fault for g, fault in faults.items() if fault and not GATES[g].two_sided}
    if workload.name.startswith(LADDER):
        right = all(checks.get(gate, True) for gate in workload.gates)
        record.judgement = Judgement(faults=described, right=right)
    else:
        record.judgement = Judgement(checks=checks, faults=described)


def correct_finish_reason(answer: Answer, max_tokens: int | None) -> None:
    """Set the reason "length" where a call was cut at max_tokens: some servers report "tool_calls" for it."""
    count = answer.counted_tokens
    reported = answer.finish_reason
    if max_tokens is None or count is None or count < max_tokens or reported == "length":
        return
    if not all(map(_has_arguments, answer.tool_calls)):
        answer.finish_reason = "length"
        answer.warnings.append(
            f"the server reported {reported!r} for a call that was cut at max_tokens"
        )


def _has_arguments(call: ToolCall) -> bool:
    try:
        arguments_of(call)
    except ValueError:
        return False
    return True


def no_words(answer: Answer) -> bool:
    """Return whether an answer has no language: nothing at all, or the loops and characters of a wrong computation.

    Without text, an answer that thinking or max_tokens ended is another fault.
    """
    if answer.text.strip():
        return bool(repeats(answer.text) or garbled(answer.text))
    thought = answer.reasoning.strip() or answer.finish_reason == "length"
    return not thought and not answer.tool_calls


def judge_scenario(record: RequestRecord, played: Played) -> None:
    """Set the answer, the duration and the judgement of a scenario that tool-eval-bench has played."""
    passed = played.status == "pass"
    record.answer = Answer(
        text=f"{played.status}, {played.points} points: {played.summary}",
        error=played.error or None,
        finish_reason="stop",
    )
    record.timings.e2e_ms = 1e3 * played.duration_s
    record.judgement = Judgement(
        checks={GATE: passed}, faults={} if passed else {GATE: played.summary}
    )


def mark(
    records: Sequence[RequestRecord],
    workloads: Sequence[Workload],
    reference: Sequence[RequestRecord],
) -> bool:
    """Set the checks of `records` and of `reference` that compare with bf16's answers. Return whether any of `records` changed.

    reference: bf16's records, of this run (then they are among `records`) or of an earlier one.
    """
    cases: Cases = {}
    for workload in workloads:
        if workload.temperature == 0 and set(REFERENCE_GATES) & set(workload.gates):
            cases |= {(workload.name, case.id): (workload, case) for case in workload.cases}
    before = [(dict(r.judgement.checks), dict(r.judgement.faults)) for r in records]
    own = keyed([r for r in reference if (r.workload, r.case) in cases])
    answers: dict[Key, Answer] = {}
    for record, key in own:
        if not record.answer.fault:
            answers.setdefault(key, record.answer)
    unstable: set[tuple[Key, str]] = set()
    for record, key in own:
        _check(
            record,
            key,
            cases,
            answers,
            unstable=(),
        )
        for gate in REFERENCE_GATES:
            if record.judgement.checks.get(gate) is False:
                unstable.add((key, gate))
    for record, key in [*own, *keyed([r for r in records if (r.workload, r.case) in cases])]:
        _check(
            record,
            key,
            cases,
            answers,
            unstable,
        )
    return before != [(r.judgement.checks, r.judgement.faults) for r in records]


def _check(
    record: RequestRecord,
    key: Key,
    cases: Cases,
    answers: Mapping[Key, Answer],
    unstable: Iterable[tuple[Key, str]],
) -> None:
    workload, case = cases[record.workload, record.case]
    for gate in REFERENCE_GATES:
        record.judgement.checks.pop(gate, None)
        record.judgement.faults.pop(gate, None)
    reference = answers.get(key)
    if reference is None:
        return
    at_turn = case.at_turn(record.turn)
    for gate in workload.gates:
        if gate not in REFERENCE_GATES or (key, gate) in unstable:
            continue
        check = GATES[gate].check
        fault = check(record.answer, at_turn, workload, reference)
        if record.answer.fault and check(reference, at_turn, workload, reference) is not None:
            fault = record.answer.fault
        if fault is not None:
            record.judgement.checks[gate] = not fault
        if fault:
            record.judgement.faults[gate] = fault


def keyed(records: Iterable[RequestRecord]) -> list[tuple[RequestRecord, Key]]:
    """Return measured records with what their answers depend on."""
    conversations: dict[str, dict[int, str]] = {}
    measured = [r for r in records if not r.warmup]
    for record in measured:
        calls = [normalized_call(call) for call in record.answer.tool_calls]
        answer = json.dumps([record.answer.text.strip(), calls])
        conversations.setdefault(_conversation(record), {})[record.turn] = answer
    result = []
    for record in measured:
        turns = conversations[_conversation(record)]
        earlier = "\n".join(turns.get(turn, "") for turn in range(record.turn))
        result.append((record, (record.workload, record.case, record.turn, earlier)))
    return result


def _conversation(record: RequestRecord) -> str:
    return f"{record.backend}/{record.id.rpartition('/')[0]}"


# ---- an earlier run


def store_reference(
    run: Path, folder: Path, workloads: Sequence[Workload], stated: str | None = None
) -> int:
    """Copy bf16's records of an earlier run into `folder`, those of prompts that are in `workloads` unchanged. Return how many.

    stated: the bf16 side of that run; default: its reference. Raises UsageError where the run has none, or none of these prompts.
    """
    inputs = documents.decode(documents.Inputs, run / "inputs.json", error=UsageError)
    names = [b.name for b in inputs.config.backends]
    name = stated or decision.roles_of(documents.read_bench(run).aggregates).reference
    if name not in names:
        problem = f"no side {name!r}" if name else "no side that is known to be bf16"
        raise UsageError(
            f"--reference-run {run}: it has {problem}",
            f"add --reference NAME, one of: {', '.join(names)}",
        )
    now = dict(contents(complete_workload(w) for w in workloads))
    same = {key for key, content in contents(inputs.workloads) if now.get(key) == content}
    path = run / "records.jsonl"
    measured = [r for r in read_records(path) if not r.warmup] if path.is_file() else []
    records = [r for r in measured if r.backend == name and (r.workload, r.case) in same]
    if not records:
        raise UsageError(
            f"--reference-run {run}: it has no bf16 answers to the prompts of this benchmark",
            "use the same --persona, --workloads, --n and --seed as there",
        )
    write_records(folder / STORED, records)
    return len(records)


def contents(workloads: Iterable[SentWorkload]) -> Iterator[tuple[tuple[str, str], bytes]]:
    """Yield (workload, case) and all that is sent for it."""
    for workload in workloads:
        settings = [workload.system, workload.thinking, workload.max_tokens, workload.temperature]
        for case in workload.cases:
            content = documents.SentCase(
                id=case.id,
                messages=case.messages,
                turns=case.turns,
                tools=case.tools,
            )
            yield (workload.name, case.id), documents.encode([settings, content])


def stored_reference(folder: Path) -> list[RequestRecord]:
    """Return bf16's records of an earlier run that are stored in a run directory."""
    path = folder / STORED
    return read_records(path) if path.is_file() else []
