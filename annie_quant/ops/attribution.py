"""Who is to blame when a served model lost its manners: arms over the same prompts that change one thing at a time.

    attribute(target, workloads, folder)     measure arms until a culprit is identified, or nobody is (attribution_plan.py)

Each arm is a benchmark of one server in FOLDER/arms/NAME, so that its answers are written at once and a second call goes on. A
prompt with a label is judged by its label and by the rules; one without also by the gates that compare with the base's answer, in
which the base's second measurement is the base: what changes there is noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from annie_quant import bench, documents
from annie_quant.bench.reference_answers import mark
from annie_quant.bench.run_folder import read_records, workload_settings
from annie_quant.core.errors import CheckpointError, ServerError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import keyed_folder
from annie_quant.core.templates import render_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RequestRecord
from annie_quant.judge.gates import GATES, REFERENCE_GATES, decides
from annie_quant.judge.pairing import deciding_by_prompt, has_label
from annie_quant.judge.statistics import excess_loss, mcnemar
from annie_quant.judge.workloads import Workload
from annie_quant.ops.attribution_plan import (
    ArmResult,
    Conclusion,
    Effect,
    Factors,
    NextArm,
    plan,
    untested_factors,
    with_needed,
)
from annie_quant.ops.attribution_servers import Target, Varied, ineffective, request_settings, title

FILE = "attribution.json"
# Of answers without a label that may differ from the base's: a harmless change of the arithmetic changes some.
MARGIN = 0.05
HANGS = 3  # requests without an answer in a row after which a server counts as hanging


class Attribution(msgspec.Struct, kw_only=True):
    """attribution.json: the result.

    conclusion: causes, open explanations, factors that could not be tested.
    fixed: factors that cannot be changed at these servers, with the reason.
    in_text: answers of the arm with the most factors that have a tool call in their text.
    """

    sentence: str
    guilty: bool
    conclusion: Conclusion
    varied: list[Varied]
    fixed: dict[str, str]
    in_text: int
    arms: list[ArmResult]


@dataclass
class AttributionRun:
    """The arms of one attribution and their answers.

    timeout_s: limit of one request.
    """

    target: Target
    workloads: Sequence[Workload]
    folder: Path
    headers: Mapping[str, str] = field(default_factory=dict)
    max_arms: int = 12
    timeout_s: float = 120.0
    seed: int = 0
    progress: Progress = SILENT
    results: list[ArmResult] = field(default_factory=list)
    answers: dict[tuple[Factors, bool], list[RequestRecord]] = field(default_factory=dict)

    def run(self) -> Attribution:
        """Measure arms until the planner concludes, and write the result to FOLDER/attribution.json.

        Raises ServerError where the base has no server: without it nothing can be compared.
        """
        if not any(w.cases for w in self.workloads):
            raise UsageError("there are no prompts to compare with", "choose other --workloads")
        names = [v.name for v in self.target.varied]
        for side in ("trusted", "suspect"):  # a value that is not one is an error before the first server starts
            request_settings({v.name: getattr(v, side) for v in self.target.varied})
        while isinstance(step := plan(names, self.results, self.max_arms), NextArm):
            self.progress.update(len(self.results), None, f"{arm_name(step)} ({step.why})")
            result = self.measure(step, [name for name in names if name not in untested_factors(names, self.results)])
            self.results.append(result)
            self.progress.message(f"{arm_name(step)}: {outcome(result)}")
        most = self.answers[max(self.answers, key=lambda key: len(key[0]))]
        attribution = Attribution(
            sentence=sentence(step, self.results),
            guilty=bool(step.causes or step.open) or any(is_broken(r) for r in self.results),
            conclusion=step,
            varied=self.target.varied,
            fixed=self.target.fixed,
            in_text=sum("<tool_call>" in r.answer.text and not r.answer.tool_calls for r in most),
            arms=self.results,
        )
        documents.write(self.folder / FILE, attribution)
        return attribution

    def measure(self, step: NextArm, tested: Sequence[str]) -> ArmResult:
        """Return the result of one arm, whose answers are taken from an earlier call where they are complete."""
        values = dict(self.target.constant)
        values |= {v.name: v.suspect if v.name in step.factors else v.trusted for v in self.target.varied}
        settings, name = request_settings(values), arm_name(step)
        workloads = [with_fields(w, settings.fields) for w in self.workloads]
        asked = [(w.name, workload_settings(w).asked_sha256) for w in workloads]
        folder = keyed_folder(self.folder / "arms" / name, {"values": values, "asked": asked, "seed": self.seed})
        try:
            if not (folder / "bench.json").is_file():
                with self.target.serve(values, self.folder / "logs" / f"{name}.log", self.progress) as url:
                    backend = bench.Backend("server", url, headers=self.headers)
                    bench.run(
                        [backend], workloads, folder, progress=self.progress, watch=Watch(), prefix_cache=settings.prefix_cache,
                        concurrency=settings.concurrency, timeout_s=self.timeout_s, seed=self.seed, warmup=0, runs=1,
                        with_memory=False,
                    )  # fmt: skip
            records = [r for r in read_records(folder / "records.jsonl") if not r.warmup]
            answered = [r for r in records if not r.answer.error]
            refused = all(
                400 <= r.answer.status < 500 for r in records
            )  # with a suspect's value: these answers are lost
            if not answered and not (refused and step.factors):
                raise ServerError(f"no request has an answer: {records[0].answer.error}", "see the server's log")
        except (ServerError, CheckpointError) as error:
            if not step.factors:
                raise
            return ArmResult(step.factors, failure=error.message)
        for record in records:
            record.prompt_sha256 = ""  # its fields are part of it, and sampling changes them; the case's id is not
        self.answers[step.factors, step.again] = records
        effect = compare_answers(self.workloads, self.answers[(), False], self.answers.get(((), True), []), records)
        without = ineffective(tested, step.factors, answered) if answered else {}
        return ArmResult(step.factors, step.again, effect if step.factors or step.again else None, "", without)


@dataclass
class Watch:
    """Raises ServerError where HANGS requests of an arm in a row have no answer."""

    unanswered: int = 0

    def __call__(self, record: RequestRecord) -> None:
        self.unanswered = self.unanswered + 1 if record.answer.cause in ("timeout", "idle") else 0
        if self.unanswered == HANGS:
            raise ServerError(f"the server hangs: {HANGS} requests in a row had no answer", "use a longer --timeout-s")


def arm_name(step: NextArm | ArmResult) -> str:
    return "+".join(step.factors) or ("base-again" if step.again else "base")


def with_fields(workload: Workload, fields: JsonObject) -> Workload:
    """Return a workload whose requests have these fields; a temperature replaces its own."""
    rest = {name: value for name, value in fields.items() if name != "temperature"}
    return replace(
        workload, temperature=fields.get("temperature", workload.temperature), extra={**workload.extra, **rest}
    )


def compare_answers(
    workloads: Sequence[Workload],
    base: Sequence[RequestRecord],
    again: Sequence[RequestRecord],
    arm: Sequence[RequestRecord],
) -> Effect:
    """Return how many prompts only the base, and only the arm, answers rightly. Sets the checks that compare with the base.

    Without a label, the base's second measurement has to agree with the first: then an arm without a fault loses as many
    as it wins.
    """
    rows = []
    for records in (base, again, arm):
        mark(records, [replace(w, temperature=0) for w in workloads], base)
        rows.append(deciding_by_prompt(records, [w.name for w in workloads]))
    before, second, after = rows
    informative = {gate for w in workloads for gate in w.informative}
    counts = {True: [0, 0, 0], False: [0, 0, 0]}  # with a label or without: n, lost, won
    for prompt, row in before.items():
        gates = [g for g in row if decides(g) and not GATES[g].two_sided and g not in informative]
        rules = [g for g in gates if g not in REFERENCE_GATES]
        same = [] if has_label(row) else [g for g in gates if g in REFERENCE_GATES]
        new, floor = after.get(prompt, {}), second.get(prompt, {})
        was_right = all(row[g] for g in rules) and all(floor.get(g, False) for g in same)
        is_right = all(new.get(g, False) for g in (*rules, *same))
        count = counts[has_label(row)]
        count[0] += bool(rules or same)
        count[1] += was_right and not is_right
        count[2] += is_right and not was_right
    (n, lost, won), (n_same, lost_same, won_same) = counts[True], counts[False]
    p_values = [mcnemar(lost, won)] * bool(n) + [excess_loss(lost_same, n_same, MARGIN, won_same)] * bool(n_same)
    p = min([1.0, *(len(p_values) * p for p in p_values)])  # Bonferroni's correction for the two kinds of prompts
    return Effect(n + n_same, lost + lost_same, won + won_same, p)


# ---- words


def is_broken(result: ArmResult) -> bool:
    return result.valid and result.effect is not None and result.effect.broken


def sentence(end: Conclusion, results: Sequence[ArmResult]) -> str:
    """Return the result in one sentence."""
    effects = {r.factors: r.effect for r in results if r.valid and r.effect and r.factors}
    noise = next((f"{r.effect.lost} when the base is repeated" for r in results if r.again and r.effect), "unknown")
    worst = max(effects.values(), key=lambda e: e.lost, default=None)
    either = ", or ".join(" and ".join(map(blamed, causes)) for causes in end.open)
    start = f"not decided between {either}" if either else "not decided" if end.unfinished else "nobody is to blame"
    everything = max((r.factors for r in results), key=len)
    parts = [f"{blamed(cause)} {broke(cause, effects[with_needed(cause, everything)])}" for cause in end.causes]
    if worst is None:
        parts = ["nothing could be tested"]
    elif not parts:
        rest = "" if either else f" and fix {worst.won} ({noise})"
        parts = [f"{start}: all factors together break {worst.lost} of {worst.n} answers{rest}"]
    innocent = [f for f, e in effects.items() if len(f) == 1 and not e.broken and f[0] not in {*sum(end.causes, ())}]
    return "; ".join([*parts, *(f"{blamed(f)} {broke(f, effects[f])} (within noise)" for f in innocent)])


def blamed(cause: Factors) -> str:
    return " with ".join(title(name) for name in reversed(cause))


def broke(cause: Factors, effect: Effect) -> str:
    verb = "break" if len(cause) == 1 and title(cause[0]).endswith("s") else "breaks"
    return f"{verb} {effect.lost} of {effect.n} answers" + (f" and fixes {effect.won}" if effect.won else "")


def outcome(result: ArmResult) -> str:
    """Return what an arm showed."""
    if result.failure:
        return f"no answers: {result.failure}"
    if not result.valid:
        return "invalid: " + "; ".join(f"{title(name)}: {why}" for name, why in result.ineffective.items())
    if result.effect is None:
        return "measured"
    return f"lost {result.effect.lost}, won {result.effect.won} of {result.effect.n}, p {result.effect.p:.2g}"


def lines(result: Attribution) -> list[str]:
    """Return what was measured: each arm, what could not be tested, and what cannot be changed."""
    words = {"arm_name": arm_name, "outcome": outcome, "is_broken": is_broken, "title": title}
    return render_text("attribution.txt", result=result, **words).splitlines()
