"""The benchmark's run: smoke request, warm-ups, interleaved measured requests, records as they come, aggregates.

A run directory is resumed: what records.jsonl holds is not asked again. Ctrl-C and a dead server end the run, and all
that was finished is kept.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from annie_quant import judge
from annie_quant.bench import memory
from annie_quant.bench.aggregate import aggregate_records
from annie_quant.bench.backend import Backend, alive, identity
from annie_quant.bench.export import export
from annie_quant.bench.folder import config_of, open_folder
from annie_quant.bench.machine import environment, load_per_core
from annie_quant.bench.plan import Visit, choose, plan, warmups
from annie_quant.bench.store import Records
from annie_quant.errors import ServerError, UsageError
from annie_quant.files import read_json, sha256_text, write_json
from annie_quant.judge.workloads import Case, Workload, build_workload

Progress = Callable[[int, int, str], None]

SMOKE = {
    "name": "smoke",
    "max_tokens": 100,
    "temperature": 0,
    "system": "You are Annie, a personal AI companion. Speak naturally and concisely. Never use markdown.",
    "gates": ["non_empty", "factual", "no_markdown", "thinking_leak"],
    "cases": [
        {
            "id": "capital",
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
            "expect": {"contains": ["Tokyo"]},
        }
    ],
}


def run(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: str | os.PathLike,
    *,
    warmup: int = 2,
    runs: int = 5,
    n: int | None = None,
    seed: int = 0,
    concurrency: int | Sequence[int] = 1,
    resume: bool = True,
    progress: Progress | None = None,
    prefix_cache: str = "warm",
    timeout_s: float = 120.0,
    reference: str | None = None,
    with_memory: bool = True,
    budget_s: float | None = None,
) -> dict[str, Any]:
    """Measure `backends` over `workloads` (objects or names) into the folder `output`; returns what bench.json holds.

    warmup: requests for each backend and workload that are never counted. runs: times each case is measured. n: at
    most so many cases of a workload (chosen by `seed`; None: all). concurrency: requests in flight at one backend, or
    several levels. prefix_cache: "warm" (as servers come; declared in the record) or "off" (no reuse between requests,
    where the server can). reference: the backend that verbosity is measured against (default: the first).
    budget_s: stop measuring after so many seconds; what is left is said in the verdict, and the same call goes on with it.
    progress(done, total, text).

    Raises UsageError (bad arguments, a folder of another benchmark), ServerError (a server is not there or went away).
    """
    loaded = [w if isinstance(w, Workload) else judge.load_workloads([w])[0] for w in workloads]
    levels = [concurrency] if isinstance(concurrency, int) else list(concurrency)
    _check(backends, loaded, warmup, runs, n, levels, prefix_cache)
    folder = Path(output)
    config = config_of(backends, loaded, warmup, runs, n, seed, levels, prefix_cache, reference or backends[0].name)
    open_folder(folder, config, loaded, resume)
    records = Records(folder / "records.jsonl")
    try:
        session = _Session(list(backends), folder, records, timeout_s, prefix_cache, progress)
        unasked = session.measure(loaded, warmup, runs, n, seed, levels, budget_s)
        seen = session.identities
        memories = session.memory(loaded, n, seed) if with_memory else {}
    finally:
        records.close()
    aggregates = aggregate_records(
        records.rows,
        config["workloads"],
        seen,
        reference=config["reference"],
        seed=seed,
        memories=memories,
        unasked=unasked,
    )
    result = {
        "schema_version": 1,
        "unasked": unasked,
        "requests": sum(not row.get("warmup") for row in records.rows),
        "environment": environment(),
        "config": config,
        "backends": seen,
        "memory": memories,
        "aggregates": aggregates,
        "verdict": judge.verdict(aggregates),
    }
    write_json(folder / "bench.json", result)
    export(folder)
    return result


def _check(
    backends: Sequence[Backend],
    workloads: Sequence[Workload],
    warmup: int,
    runs: int,
    n: int | None,
    levels: Sequence[int],
    prefix_cache: str,
) -> None:
    names = [b.name for b in backends]
    if not names:
        raise UsageError("there is no backend to measure", "give at least one: --backend-a NAME URL")
    if len(set(names)) < len(names):
        raise UsageError(f"two backends have the same name: {', '.join(names)}", "give each its own")
    if not workloads:
        raise UsageError("there is no workload to measure")
    if runs < 1 or warmup < 0 or (n is not None and n < 1) or not levels or min(levels) < 1:
        raise UsageError(
            f"runs, n and concurrency must be 1 or more and warmup 0 or more; got runs={runs}, n={n}, "
            f"concurrency={list(levels)}, warmup={warmup}"
        )
    if prefix_cache not in ("warm", "off"):
        raise UsageError(f"prefix_cache is 'warm' or 'off', got {prefix_cache!r}")


class _Session:
    """One go at a run: who was greeted, what is left to ask, and the file that keeps it."""

    def __init__(
        self,
        backends: list[Backend],
        folder: Path,
        records: Records,
        timeout_s: float,
        prefix_cache: str,
        progress: Progress | None,
    ) -> None:
        self.backends = {b.name: b for b in backends}
        self.folder, self.records, self.timeout_s, self.prefix_cache = folder, records, timeout_s, prefix_cache
        self.progress = progress or (lambda done, total, text: None)
        self.identities: dict[str, dict[str, Any]] = {}
        self.done = {row["id"]: row for row in records.rows if not row.get("warmup")}
        self.session = 1 + max((row.get("session", 0) for row in records.rows), default=0)
        self.batch = sum(1 for _ in (folder / "streams").glob("*")) if (folder / "streams").is_dir() else 0

    def measure(
        self,
        workloads: Sequence[Workload],
        warmup: int,
        runs: int,
        n: int | None,
        seed: int,
        levels: Sequence[int],
        budget_s: float | None,
    ) -> int:
        """Ask what is left, within the budget of time; returns how many visits it left out."""
        start = time.monotonic()
        names = list(self.backends)
        visits = [v for level in levels for v in plan(names, workloads, runs=runs, n=n, seed=seed, concurrency=level)]
        left = [v for v in visits if any(i not in self.done for case, repeat in v.cases for i in v.ids(case, repeat))]
        self._greet(smoke=bool(left))
        wanted = {v.workload.name for v in left}
        warm = warmups(names, [w for w in workloads if w.name in wanted], warmup, n, seed, 1)
        total, finished = len(warm) + len(visits), len(visits) - len(left)
        for index, visit in enumerate([*warm, *left]):
            if budget_s is not None and index >= len(warm) and time.monotonic() - start > budget_s:
                return len(warm) + len(left) - index
            self.progress(finished, total, f"{visit.backend} · {visit.workload.name}")
            self._visit(visit)
            finished += 1
        self.progress(total, total, "")
        return 0

    def _greet(self, smoke: bool) -> None:
        """Ask each server who it is; before measuring, put the smoke question. Its first request is a cold one."""
        workload = build_workload(SMOKE)
        for name, backend in self.backends.items():
            try:
                self.identities[name] = identity(backend)
            except OSError as error:
                raise ServerError(
                    f"backend {name!r}: no server answers at {backend.public_url} ({error})",
                    "start it, then run the same command: finished requests are kept",
                ) from error
            if smoke:
                self._visit(Visit(-1, name, workload, ((workload.cases[0], self.session),), 1, warmup=True), cold=True)

    def _visit(self, visit: Visit, cold: bool = False) -> None:
        """One visit, turn by turn; the turns of all its conversations go out together."""
        talks: list[list[dict[str, Any]]] = [[] for _ in visit.cases]
        for turn in range(max(case.n_turns for case, _ in visit.cases)):
            asked = []
            for talk, (case, repeat) in zip(talks, visit.cases, strict=True):
                if turn >= case.n_turns:
                    continue
                row = self._row(visit, case, repeat, turn, cold)
                before = None if visit.warmup else self.done.get(row["id"])
                if before is not None:
                    talk.append({"role": "assistant", "content": before.get("text") or ""})
                else:
                    asked.append(
                        (row, visit.workload.request(case, turn, talk, self._model(visit.backend)), talk, case)
                    )
            if asked:
                self._ask(visit, asked)

    def _row(self, visit: Visit, case: Case, repeat: int, turn: int, cold: bool) -> dict[str, Any]:
        name = visit.ids(case, repeat)[turn]
        return {
            "id": f"{name}#warm{self.session}" if visit.warmup else name,
            "backend": visit.backend,
            "model": self._model(visit.backend),
            "workload": visit.workload.name,
            "case": case.id,
            "turn": turn,
            "repeat": repeat,
            "block": visit.block,
            "warmup": visit.warmup,
            "cold": cold,
            "session": self.session,
            "concurrency": visit.concurrency,
        }

    def _model(self, name: str) -> str | None:
        return self.backends[name].model or self.identities[name]["model"]

    def _ask(self, visit: Visit, asked: list[tuple[dict[str, Any], dict[str, Any], list, Case]]) -> None:
        backend = self.backends[visit.backend]
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        timings = self._send(backend, [(row["id"], body) for row, body, _, _ in asked])
        heard = {record["tag"]: record for record in timings.records() if record["tag"] is not None}
        lost = [r for r in heard.values() if r.get("error")]
        if lost and not alive(backend):
            raise ServerError(
                f"backend {backend.name!r} at {backend.public_url} went away: {lost[0]['error']}",
                "start it again, then run the same command: it resumes where it stopped",
            )
        place = f"{self.batch:06d}"
        timings.save(self.folder / "streams" / place)
        self.batch += 1
        for row, body, talk, case in asked:
            record = {k: v for k, v in heard[row["id"]].items() if k not in ("tag", "url", "model")}
            answer = judge.from_record(record)
            talk.append({"role": "assistant", "content": answer.text})
            faults = judge.faults(answer, case.at_turn(row["turn"]), visit.workload)
            row |= {
                "started_at": started,
                "load_per_core": load_per_core(),
                "stream": place,
                "request_sha256": sha256_text(json.dumps(body, sort_keys=True)),
                **record,
                "checks": {gate: not fault for gate, fault in faults.items() if fault is not None},
                "faults": {gate: fault for gate, fault in faults.items() if fault},
            }
            self.records.append(row)
            if not row["warmup"]:
                self.done[row["id"]] = row

    def _send(self, backend: Backend, asked: Sequence[tuple[str, dict[str, Any]]]) -> Any:
        """Put (tag, body) pairs to a server, all at once; returns the client's Timings.

        Each connection is opened by asking for the list of models, as a client in daily use holds its connection open.
        """
        from annie_quant import stream

        headers = dict(backend.headers)
        opening = [
            stream.Request(f"{backend.root}/v1/models", headers=headers, timeout_s=self.timeout_s) for _ in asked
        ]
        requests = [
            stream.Request(
                backend.completions_url,
                json=body | self._cache_fields(backend.name, tag),
                headers=headers,
                timeout_s=self.timeout_s,
                tag=tag,
            )
            for tag, body in asked
        ]
        return stream.run([*opening, *requests], concurrency=len(requests))

    def _cache_fields(self, name: str, row_id: str) -> dict[str, Any]:
        """What keeps a server from reusing earlier prompts: llama.cpp's and vLLM's own request fields."""
        if self.prefix_cache == "warm":
            return {}
        runtime = self.identities[name].get("runtime")
        if runtime == "llama.cpp":
            return {"cache_prompt": False}
        return {"cache_salt": f"{self.session}/{row_id}"} if runtime == "vllm" else {}

    def memory(self, workloads: Sequence[Workload], n: int | None, seed: int) -> dict[str, Any]:
        """Memory at idle, with one request and with five, of the backends whose process id is known; measured once."""
        single = next((w for w in workloads if not w.cases[0].turns), None)
        kept = self.folder / "memory.json"
        found = read_json(kept) if kept.exists() else {}
        for name, backend in self.backends.items():
            if single is None or not backend.meta.get("pid") or name in found:
                continue
            cases = choose(single, n, seed)

            def load(count: int, backend: Backend = backend, cases: list[Case] = cases) -> None:
                bodies = [single.request(cases[i % len(cases)], 0, (), self._model(backend.name)) for i in range(count)]
                self._send(backend, [(f"memory/{i}", body) for i, body in enumerate(bodies)])

            found[name] = memory.measure(int(backend.meta["pid"]), load)
            write_json(kept, found)
        return found
