"""A benchmark from start to end: smoke question, warm-ups, interleaved measured requests, aggregates, exports.

A run directory is resumed: what records.jsonl has is not sent again. Ctrl-C or a dead server ends the run, and everything
that was finished is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from annie_quant import documents, judge
from annie_quant.bench import machine, memory, run_folder
from annie_quant.bench import plan as planning
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.backend import (
    PROBE_TIMEOUT_S,
    Backend,
    BudgetEnded,
    Sender,
    ServerRequest,
    alive,
    identity,
)
from annie_quant.bench.confounds import is_slow, smoke_finding
from annie_quant.bench.counters import CounterReader
from annie_quant.bench.exports import write_exports
from annie_quant.bench.prefill import length_class
from annie_quant.bench.reference_answers import (
    STORED,
    correct_finish_reason,
    judge_record,
    judge_scenario,
    mark,
    no_words,
    store_reference,
    stored_reference,
)
from annie_quant.core.errors import ServerError
from annie_quant.core.files import ASSETS, read_json, sha256_text
from annie_quant.core.host import environment, load_per_core
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject, integer
from annie_quant.documents import Bench, ChatMessage, Ended, Identity, RequestRecord, Roles
from annie_quant.judge import decision, tool_eval
from annie_quant.judge.answers import assistant_message
from annie_quant.judge.library import build_workload
from annie_quant.judge.workloads import Case, Workload

if TYPE_CHECKING:
    from annie_quant.stream import Timings

OnRecord = Callable[[RequestRecord], None]

SMOKE = read_json(ASSETS / "smoke.json")  # sent before anything is measured (R40)


@dataclass(kw_only=True)
class TurnOfCase(ServerRequest):
    """The request of one turn, with what its answer is judged by.

    record: its record, which the answer completes.
    history: the conversation's earlier answers; this request's is added.
    """

    record: RequestRecord
    case: Case
    history: list[ChatMessage]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class Session:
    """One execution of a plan: it identifies the servers, sends what is left, and records each answer as it arrives.

    records   what earlier executions measured; new records are appended
    recorded  bf16's answers of an earlier run
    """

    def __init__(
        self,
        plan: planning.BenchPlan,
        records: run_folder.RecordLog,
        recorded: Sequence[RequestRecord],
        progress: Progress,
        on_record: OnRecord,
    ) -> None:
        self.config = plan.config
        self.workloads = plan.workloads
        self.folder = plan.folder
        self.stop_at_smoke = plan.stop_at_smoke
        self.records = records
        self.recorded = recorded
        self.backends = {b.name: b for b in plan.backends}
        self.progress = progress
        self.on_record = on_record
        self.identities: dict[str, Identity] = {}
        self.counters = CounterReader()
        # Those with a context, fitted to the models' tokenizer.
        self.sized: dict[str, Workload] = {}
        # The backend whose request in flight at the end of the budget had taken far longer than its others.
        self.hung = ""
        self.digests: dict[tuple[str, str], str] = {}  # judge.prompt_sha256 by workload and case
        self.unique = secrets.token_hex(4)  # no prompt of an earlier run starts with it
        # The last measurement of each request, but those to measure again.
        self.done: dict[str, RequestRecord] = {}
        has_local = any(b.is_local for b in plan.backends)
        self.machine = machine.Monitor(self.folder, restart=not records.rows, on_gpu=has_local)
        self.marked = any(r.load.invalid for r in records.rows)
        self.session = 1 + max((r.session for r in records.rows), default=0)
        self.sender = Sender(self.config, self.session, self.identities)
        sampled = plan.backends if self.config.with_memory else ()
        self.memory = memory.ServerMemory(sampled, self.folder)
        self.batch = sum(1 for _ in (self.folder / "streams").glob("*"))
        self.lengths: set[tuple[str, int]] = set()  # backend, length_class of what it has computed

    def run(self) -> Ended:
        """Send what is left of the plan, until it is done or the time budget ends.

        The budget is a deadline of every request and probe, the smoke question and warm-ups included. Requests that the machine's
        state makes invalid are sent again.
        """
        visits = planning.planned_visits(list(self.backends), self.workloads, self.config)
        self._take_back(visits)
        while True:
            ended = self._pass(visits)
            again = self._take_back(visits)
            if not again or ended.unasked:
                return ended
            self.progress.message(
                f"the machine was in another state during {again} requests: they are measured again"
            )
            self.unique = secrets.token_hex(4)

    def _take_back(self, visits: Sequence[planning.Visit]) -> int:
        """Mark the requests that the machine's state makes invalid; return how many are no longer done, to be measured again.

        Requests that are sent together are measured again together.
        """
        measured = [r for r in self.records.rows if not r.warmup]
        self.done = {r.id: r for r in measured}
        invalid = machine.mark_invalid(self.done.values(), machine.unsteady(self.machine.samples))
        self.marked |= bool(invalid)
        times = Counter(r.id for r in measured)
        again = {r.id for r in invalid if times[r.id] <= machine.PASSES}
        for visit in visits if again else ():
            ids = visit.all_ids
            if not again.isdisjoint(ids):
                for i in ids:
                    self.done.pop(i, None)
        return len(again)

    def _pass(self, visits: Sequence[planning.Visit]) -> Ended:
        """Send the visits that are not done."""
        run_folder.write_unanswered(self.folder, ())
        left = [visit for visit in visits if not self.done.keys() >= set(visit.all_ids)]
        try:
            self._identify(smoke=bool(left))
        except BudgetEnded:
            return self._budget_ended(left)
        # Levels of a ladder that a server's context does not hold are no part of the run.
        left = [v for v in left if planning.fits(v, self.identities[v.backend].max_model_len)]
        names_left = {v.workload.name for v in left}
        workloads_left = [w for w in self.workloads if w.name in names_left]
        warmups = [
            visit
            for visit in planning.warmups(list(self.backends), workloads_left, self.config)
            if planning.fits(visit, self.identities[visit.backend].max_model_len)
        ]
        total = len(warmups) + len(visits)
        done = len(visits) - len(left)
        for index, visit in enumerate([*warmups, *left]):
            text = f"{visit.backend} · {visit.workload.name}"
            self.progress.update(done + index, total, text)
            try:
                self._visit(visit)
            except BudgetEnded:
                return self._budget_ended(left[max(0, index - len(warmups)) :])
        self.machine.sample()
        self.progress.update(total, total)
        return Ended(prefix_cache=self.config.prefix_cache)

    def _budget_ended(self, unasked: Sequence[planning.Visit]) -> Ended:
        """Return how the run ended. What a backend that hung was still to answer counts as failed answers of this backend."""
        rows: list[RequestRecord] = []
        for visit in unasked:
            for case, repeat in visit.cases if visit.backend == self.hung else ():
                for turn in range(case.n_turns):
                    record = self._new_record(
                        visit,
                        case,
                        repeat,
                        turn,
                        cold=False,
                    )
                    if record.id not in self.done:
                        cause, error = run_folder.UNANSWERED_CAUSES[bool(rows)]
                        record.answer.cause = cause
                        record.answer.error = error
                        judge_record(record, case, visit.workload)
                        rows.append(record)
        run_folder.write_unanswered(self.folder, rows)
        return Ended(unasked=len(unasked), prefix_cache=self.config.prefix_cache)

    @property
    def roles(self) -> Roles:
        """The roles, from what the user named and from the formats of the weights as far as they are known now."""
        formats = {
            name: identity.format for name, identity in self.identities.items() if identity.format
        }
        return decision.assign(list(self.backends), formats, self.config.roles)

    def compare_with_reference(self) -> bool:
        """Check all answers so far against bf16's, where there are any. Return whether a record has changed."""
        name = self.roles.reference
        reference = [r for r in self.records.rows if r.backend == name] if name else self.recorded
        return mark(self.records.rows, self.workloads, reference) if reference else False

    def _identify(self, smoke: bool) -> None:
        """Identify each server. With `smoke` the smoke question is its first request, which is a cold one."""
        workload = build_workload(SMOKE)
        for name, backend in self.backends.items():
            try:
                self.identities[name] = identity(backend, self.sender.timeout_s(PROBE_TIMEOUT_S))
            except OSError as error:
                raise ServerError(
                    f"backend {name!r}: no server answers at {backend.public_url} ({error})",
                    "start it, then run the same command: finished requests are kept",
                ) from error
            if smoke:
                asked = ((workload.cases[0], self.session),)
                self._visit(
                    planning.Visit(
                        -1,
                        name,
                        workload,
                        asked,
                        warmup=True,
                    ),
                    cold=True,
                )
                self._check_smoke(backend, self.records.rows[-1])
        if smoke:
            workloads = planning.sized(self.workloads, self.folder, self._prompt_tokens)
            self.sized = {workload.name: workload for workload in workloads}

    def _check_smoke(self, backend: Backend, record: RequestRecord) -> None:
        """Raise ServerError for an answer that has no words; report one with other faults, which the run explains."""
        if not record.judgement.faults:
            return
        message = smoke_finding(backend.name, record).message
        has_words = not record.answer.error and not no_words(record.answer)
        if has_words or not self.stop_at_smoke:
            self.progress.message(message)
            return
        raise ServerError(
            message,
            f"annie-quant doctor --server {backend.public_url}, then run the same command",
        )

    def _prompt_tokens(self, body: JsonObject) -> int | None:
        """Send a chat completion's body to the first backend; return usage.prompt_tokens."""
        backend = next(iter(self.backends.values()))
        model = self._model(backend.name)
        if model:
            body = body | {"model": model}
        timings = self._send(backend, [ServerRequest("context", body)])
        usage = next(answer["usage"] for answer in timings.records() if answer["tag"] == "context")
        return integer((usage or {}).get("prompt_tokens"))

    def _visit(self, visit: planning.Visit, cold: bool = False) -> None:
        """Send one visit, turn by turn; the turns of all its conversations are sent together."""
        if visit.workload.name == tool_eval.NAME:
            for case, repeat in () if visit.warmup else visit.cases:
                self._play(visit, case, repeat)
            return
        workload = self.sized.get(visit.workload.name, visit.workload)
        histories: list[list[ChatMessage]] = [[] for _ in visit.cases]
        for turn in range(max(case.n_turns for case, _ in visit.cases)):
            turns = []
            for history, (case, repeat) in zip(histories, visit.cases, strict=True):
                if turn >= case.n_turns:
                    continue
                record = self._new_record(
                    visit,
                    case,
                    repeat,
                    turn,
                    cold,
                )
                before = None if visit.warmup else self.done.get(record.id)
                if before is not None:
                    history.append(assistant_message(before.answer.text, before.answer.tool_calls))
                    continue
                # The same for all backends and turns.
                unique = f"{self.unique} {repeat} {visit.block} {case.id}"
                body = workload.request(
                    case,
                    turn,
                    history,
                    record.model,
                    unique,
                )
                turns.append(
                    TurnOfCase(
                        record.id,
                        body,
                        record=record,
                        case=case,
                        history=history,
                    )
                )
            if turns:
                self._measure(visit, turns)

    def _play(self, visit: planning.Visit, case: Case, repeat: int) -> None:
        """Let tool-eval-bench play one of its scenarios, and record the result."""
        record = self._new_record(
            visit,
            case,
            repeat,
            0,
            cold=False,
        )
        if record.id in self.done:
            return
        self.machine.sample()
        backend = self.backends[visit.backend]
        timeout_s = self.sender.timeout_s(self.config.timeout_s)
        started_at = _now()
        started_s = time.time()
        key = backend.headers.get("Authorization", "").removeprefix("Bearer ") or None
        played = tool_eval.play(
            case.id,
            backend.root,
            record.model,
            key,
            timeout_s,
        )
        if played.error and not alive(backend):
            raise ServerError(
                f"backend {backend.name!r} at {backend.public_url} went away: {played.error}"
            )
        record.load.started_at = started_at
        record.timings.started_unix_s = started_s
        judge_scenario(record, played)
        self.records.append(record)
        self.done[record.id] = record
        self.on_record(record)

    def _new_record(
        self, visit: planning.Visit, case: Case, repeat: int, turn: int, cold: bool
    ) -> RequestRecord:
        prompt = visit.workload.name, case.id
        if prompt not in self.digests:
            self.digests[prompt] = judge.prompt_sha256(case, visit.workload)
        record = visit.record(case, repeat, turn)
        if visit.warmup:
            record.id += f"#warm{self.session}"
        record.model = self._model(visit.backend)
        record.session = self.session
        record.cold = cold
        record.prompt_sha256 = self.digests[prompt]
        return record

    def _model(self, name: str) -> str | None:
        return self.backends[name].model or self.identities[name].model

    def _measure(self, visit: planning.Visit, turns: Sequence[TurnOfCase]) -> None:
        """Send turns together, judge their answers and append their records."""
        backend = self.backends[visit.backend]
        self.machine.sample()
        started_at = _now()
        names = [turn.tag.removeprefix(backend.name) for turn in turns]
        cases = [turn.case.at_turn(turn.record.turn) for turn in turns]
        arrivals = planning.arrival_times(visit.load, names, cases)
        for turn, arrival_s in zip(turns, arrivals or (), strict=arrivals is not None):
            turn.start_s = arrival_s
            turn.record.load.arrival_s = arrival_s
        identity = self.identities.get(backend.name)
        counters = self.counters.before(backend, identity.runtime if identity else None)
        timings = self._send(backend, turns)
        answers = {row["tag"]: row for row in timings.records() if row["tag"] is not None}
        lost = [answer for answer in answers.values() if answer["error"]]
        if lost and not alive(backend):
            raise ServerError(
                f"backend {backend.name!r} at {backend.public_url} went away: {lost[0]['error']}",
                "start it again, then run the same command: it resumes where it stopped",
            )
        stream = f"{self.batch:06d}"
        timings.save(self.folder / "streams" / stream)
        self.batch += 1
        for turn in turns:
            record = turn.record
            documents.set_answer(record, answers[turn.tag])
            answer = record.answer
            correct_finish_reason(answer, turn.body.get("max_tokens"))
            turn.history.append(assistant_message(answer.text, answer.tool_calls))
            record.load.started_at = started_at
            record.load.load_per_core = load_per_core()
            record.stream = stream
            record.request_sha256 = sha256_text(json.dumps(turn.body, sort_keys=True))
            judge_record(record, turn.case, visit.workload)
        records = [t.record for t in turns]
        self.counters.after(backend, counters, records)
        self._mark_first_lengths(records)
        for record in records:
            self.records.append(record)
            if not record.warmup:
                self.done[record.id] = record
                self.on_record(record)

    def _mark_first_lengths(self, records: Sequence[RequestRecord]) -> None:
        """Mark the requests of a length that this execution had not sent to their server before."""
        lengths = set()
        for record in records:
            tokens = record.tokens.prompt_tokens - (record.tokens.cached_tokens or 0)
            if tokens > 0 and not record.answer.error:
                length = (record.backend, length_class(tokens))
                record.first_of_length = length not in self.lengths
                lengths.add(length)
        self.lengths |= lengths

    def _send(self, backend: Backend, requests: Sequence[ServerRequest]) -> Timings:
        """Send requests to a server; note whether it hung where the time budget ends meanwhile."""
        try:
            return self.sender.send(backend, requests)
        except BudgetEnded as ended:
            if ended.waited_s is not None:
                # A request that was stopped hangs where it was slow against the median of its backend's others.
                times = []
                for record in self.done.values():
                    e2e_ms = record.timings.e2e_ms
                    is_own = record.backend == backend.name and not record.answer.error
                    if is_own and e2e_ms is not None:
                        times.append(e2e_ms)
                slow = is_slow(1000 * ended.waited_s, statistics.median(times or [0.0]))
                self.hung = backend.name if slow else ""
            raise

    def measure_memory(self) -> None:
        """Measure the memory of each identified server; those that the budget leaves out have none."""
        single = next((w for w in self.workloads if not w.cases[0].turns), None)
        if single is None:
            return
        cases = planning.choose_cases(single, self.config.n, self.config.seed)

        def send(name: str, count: int) -> None:
            requests = []
            for i in range(count):
                body = single.request(cases[i % len(cases)], 0, (), self._model(name))
                requests.append(ServerRequest(f"memory/{i}", body))
            self._send(self.backends[name], requests)

        with contextlib.suppress(BudgetEnded):
            self.memory.measure(self.identities, send)


def run(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: str | os.PathLike[str],
    *,
    progress: Progress = SILENT,
    watch: OnRecord | None = None,
    **settings: Any,
) -> Bench:
    """Measure `backends` over `workloads` into the folder `output`, and return what bench.json holds.

    workloads      objects or names
    progress       what the run reports to
    watch          called with each measured record
    concurrency    requests in flight at one backend, or several levels
    rates          further levels, in arrivals per second (Poisson, open loop)
    trace_speeds   how many times as fast a trace's requests arrive
    resume         continue the run in the folder; False starts again
    stop_at_smoke  end the run where a server has no words for the smoke question
    reference_run  folder of an earlier run with a bf16 side, whose answers all sides are compared with
    candidate, reference, incumbent
                   names of backends (reference: also of the side of reference_run); what is not stated follows from their
                   order and formats (judge/decision/roles.py)

    Other settings are fields of documents.BenchConfig, which has their defaults: warmup, runs, n, seed, prefix_cache,
    timeout_s, with_memory, budget_s.

    Raises UsageError (bad arguments, a folder with another benchmark), ServerError (a server does not answer).
    """
    plan = planning.plan_benchmark(backends, workloads, output, **settings)
    folder = plan.folder
    run_folder.prepare_folder(folder, plan.config, plan.workloads, plan.resume)
    if plan.reference_run is not None:
        store_reference(plan.reference_run, folder, plan.workloads, plan.reference_name)
    recorded = stored_reference(folder)
    records = run_folder.RecordLog(folder / "records.jsonl")
    try:
        session = Session(
            plan,
            records,
            recorded,
            progress,
            watch or (lambda record: None),
        )
        with contextlib.closing(session.machine.log), session.memory:
            ended = session.run()
            session.measure_memory()
    finally:
        records.close()
    if session.compare_with_reference() or session.marked:
        records.rewrite()
    if recorded:
        run_folder.write_records(folder / STORED, recorded)  # with their checks
    valid = run_folder.valid_records(records.rows)
    levels = session.memory.levels()
    aggregates = aggregate_records(
        [*valid, *run_folder.read_unanswered(folder)],
        plan.config,
        session.identities,
        levels,
        ended,
        recorded,
        machine.summarize(session.machine.samples, [r for r in records.rows if not r.warmup]),
    )
    bench = Bench(
        ended=ended,
        requests=sum(not r.warmup for r in valid),
        environment=environment(),
        config=plan.config,
        backends=session.identities,
        memory=levels,
        aggregates=aggregates,
        verdict=judge.verdict(aggregates),
    )
    documents.write(folder / "bench.json", bench)
    write_exports(folder, bench, valid)
    return bench
