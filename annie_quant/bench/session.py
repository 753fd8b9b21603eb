"""One go at a benchmark: who was greeted, what is left to ask, and the file that keeps what came back."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from annie_quant import judge
from annie_quant.bench import memory, sequential
from annie_quant.bench.backend import Backend, alive, identity
from annie_quant.bench.energy import Meter
from annie_quant.bench.load_profile import Load
from annie_quant.bench.plan import Visit, choose, plan, warmups
from annie_quant.bench.store import Records
from annie_quant.errors import ServerError
from annie_quant.files import read_json, sha256_text, write_json
from annie_quant.host import load_per_core
from annie_quant.judge.workloads import Case, Workload, build_workload

Progress = Callable[[int, int, str], None]
Watch = Callable[[dict[str, Any]], None]

PEAK_S = 1.0  # how often memory is looked at while requests run
OPENING_S = 0.2  # connections are made this long before the first arrival of an open loop

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


class Session:
    """Greets the servers, asks what is left of the plan, writes each answer down as it comes."""

    def __init__(
        self,
        backends: list[Backend],
        folder: Path,
        records: Records,
        timeout_s: float,
        prefix_cache: str,
        progress: Progress | None,
        watch: Watch | None = None,
        greedy: frozenset[str] = frozenset(),
    ) -> None:
        self.backends = {b.name: b for b in backends}
        self.folder, self.records, self.timeout_s, self.prefix_cache = folder, records, timeout_s, prefix_cache
        self.progress = progress or (lambda done, total, text: None)
        self.watch = watch or (lambda row: None)
        self.greedy = greedy
        self.meter = Meter()
        self.peaks = {b.name: memory.Peak(int(b.meta["pid"]), every_s=PEAK_S) for b in backends if b.meta.get("pid")}
        self.identities: dict[str, dict[str, Any]] = {}
        self.done = {row["id"]: row for row in records.rows if not row.get("warmup")}
        self.session = 1 + max((row.get("session", 0) for row in records.rows), default=0)
        self.batch = sum(1 for _ in (folder / "streams").glob("*")) if (folder / "streams").is_dir() else 0

    @contextlib.contextmanager
    def watched(self, wanted: bool) -> Iterator[None]:
        """Look at the servers' memory once a second while the block runs."""
        with contextlib.ExitStack() as stack:
            for peak in self.peaks.values() if wanted else ():
                stack.enter_context(peak)
            yield

    def measure(
        self,
        workloads: Sequence[Workload],
        warmup: int,
        runs: int,
        n: int | None,
        seed: int,
        loads: Sequence[Load],
        budget_s: float | None,
        stop_early: bool,
    ) -> dict[str, Any]:
        """Ask what is left. Returns {"unasked": visits left out, "stopped": why, or None}."""
        start = time.monotonic()
        names = list(self.backends)
        visits = [v for load in loads for v in plan(names, workloads, runs=runs, n=n, seed=seed, load=load)]
        left = [v for v in visits if any(i not in self.done for case, repeat in v.cases for i in v.ids(case, repeat))]
        looks = sequential.looks(len(visits), 2 * len(names)) if stop_early else []
        asked = len(visits) - len(left)
        # Only at a planned look, though the run goes on from anywhere: a look more would not be allowed for.
        if asked in looks and self._decided():
            self._greet(smoke=False)
            return _stopped(len(left), asked, looks)
        self._greet(smoke=bool(left))
        wanted = {v.workload.name for v in left}
        warm = warmups(names, [w for w in workloads if w.name in wanted], warmup, n, seed)
        total = len(warm) + len(visits)
        for index, visit in enumerate([*warm, *left]):
            done = asked + max(0, index - len(warm))
            if done in looks and index > len(warm) and self._decided():
                self.progress(total, total, "")
                return _stopped(len(visits) - done, done, looks)
            if budget_s is not None and index >= len(warm) and time.monotonic() - start > budget_s:
                return {"unasked": len(visits) - done, "stopped": None}
            self.progress(asked + index, total, f"{visit.backend} · {visit.workload.name}")
            self._visit(visit)
        self.progress(total, total, "")
        return {"unasked": 0, "stopped": None}

    def _decided(self) -> bool:
        return not sequential.open_questions(list(self.done.values()), list(self.backends), self.greedy)

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
                self._visit(Visit(-1, name, workload, ((workload.cases[0], self.session),), warmup=True), cold=True)

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
            "concurrency": visit.load.concurrency,
            "rate_per_s": visit.load.rate_per_s,
            "n_tools": len(visit.workload.tools_for(case) or ()),
        }

    def _model(self, name: str) -> str | None:
        return self.backends[name].model or self.identities[name]["model"]

    def _ask(self, visit: Visit, asked: list[tuple[dict[str, Any], dict[str, Any], list, Case]]) -> None:
        backend = self.backends[visit.backend]
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        starts = visit.load.arrivals([row["id"].removeprefix(backend.name) for row, _, _, _ in asked])
        before = self.meter.read()
        timings = self._send(backend, [(row["id"], body) for row, body, _, _ in asked], starts)
        after = self.meter.read()
        joules = None if before is None or after is None else (after - before) / len(asked)
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
        for index, (row, body, talk, case) in enumerate(asked):
            record = {k: v for k, v in heard[row["id"]].items() if k not in ("tag", "url", "model")}
            answer = judge.from_record(record)
            talk.append({"role": "assistant", "content": answer.text})
            faults = judge.faults(answer, case.at_turn(row["turn"]), visit.workload)
            row |= {
                "started_at": started,
                "load_per_core": load_per_core(),
                "energy_j": joules,
                "arrival_s": starts[index] if starts else None,
                "stream": place,
                "request_sha256": sha256_text(json.dumps(body, sort_keys=True)),
                **record,
                "checks": {gate: not fault for gate, fault in faults.items() if fault is not None},
                "faults": {gate: fault for gate, fault in faults.items() if fault},
            }
            self.records.append(row)
            if not row["warmup"]:
                self.done[row["id"]] = row
                self.watch(row)

    def _send(
        self,
        backend: Backend,
        asked: Sequence[tuple[str, dict[str, Any]]],
        starts: Sequence[float] | None = None,
    ) -> Any:
        """Put (tag, body) pairs to a server, all at once or at their starts (seconds); returns the client's Timings.

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
                start_s=None if starts is None else OPENING_S + starts[index],
                tag=tag,
            )
            for index, (tag, body) in enumerate(asked)
        ]
        return stream.run([*opening, *requests], concurrency=None if starts is not None else len(requests))

    def _cache_fields(self, name: str, row_id: str) -> dict[str, Any]:
        """What keeps a server from reusing earlier prompts: llama.cpp's and vLLM's own request fields."""
        if self.prefix_cache == "warm":
            return {}
        runtime = self.identities[name].get("runtime")
        if runtime == "llama.cpp":
            return {"cache_prompt": False}
        return {"cache_salt": f"{self.session}/{row_id}"} if runtime == "vllm" else {}

    def memory(self, workloads: Sequence[Workload], n: int | None, seed: int) -> dict[str, Any]:
        """Memory at idle, with one request, with five and at its peak, of the backends whose process id is known; once."""
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
            found[name]["peak"] = memory.highest(self.peaks[name].highest, *found[name].values())
            write_json(kept, found)
        return found


def _stopped(unasked: int, asked: int, looks: Sequence[int]) -> dict[str, Any]:
    passed = sum(look <= asked for look in looks)
    return {"unasked": unasked, "stopped": {"look": passed, "looks": len(looks), "level": sequential.LEVEL}}
