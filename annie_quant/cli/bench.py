"""The commands that measure servers: `bench` and `attribute`.

`annie-quant bench`: time one or two servers with the same prompts.

`annie-quant attribute`: find out which setting of a served model breaks its answers.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter, validators

import annie_quant
from annie_quant.cli import options as opt
from annie_quant.cli import tables
from annie_quant.cli.terminal import console, emit
from annie_quant.core.errors import UsageError

if TYPE_CHECKING:
    from annie_quant.bench.backend import Backend
    from annie_quant.bench.regressions import Regression
    from annie_quant.documents import Aggregates, Verdict
    from annie_quant.judge import Workload
    from annie_quant.ops.attribution_servers import Target

MOST_CONVERSATIONS = 10_000
LADDER_PROMPTS = 25  # per level, with --n 0
PREFILL_WORKLOAD = "first_token"  # the workload whose lines the terminal prints


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchOptions(opt.Sides):
    """Options of `annie-quant bench`.

    Attributes:
        backend_a: A name for the figures, and the server.
        backend_b: A second server.
        aa: Measure backend A against itself: the noise floor.
        warmup: Requests per workload that are not counted.
        runs: Measurements per prompt.
        n: Prompts per gate (52 without a lost answer decide a gate, with lost ones more); 0: all.
        concurrency: Requests in flight; several loads: "1,8".
        rates: Additional loads in arrivals per second (Poisson, open loop): "0.5,2".
        prefix_cache: off: ask each server not to reuse earlier prompts.
        budget_s: Stop after this many seconds; the same command resumes.
        noise_share: With --runs 1: share of the prompts that is measured twice, for the noise floor.
        watch: An earlier run: exit 1 on a significant loss.
        reference_run: An earlier run with a bf16 side: all sides are compared with its answers (--reference: its name
            there).
        replay: Chat logs: their conversations, turn by turn, with the logged results of tools; repeatable.
        trace: A log with times: its requests at their recorded times; of OpenTelemetry spans without content, their lengths.
        trace_speed: How many times as fast the trace runs: "1,4".
        trace_n: Requests of the trace.
        ladder: Find the level at which a side breaks: tools (5 to 52), tokens (0 to 131,072, as far as the server's context
            goes), poisoned (after malformed calls), steps (chains of 12 calls); --n prompts per level, --runs for pass^k.
        seed: Of the choice and order of the prompts.
        output: Run directory; an interrupted run resumes from it.
    """

    backend_a: tuple[str, str]
    backend_b: tuple[str, str] | None = None
    aa: bool = False
    warmup: Annotated[int, opt.at_least(0)] = 2
    runs: Annotated[int, opt.at_least(1)] = 5
    n: Annotated[int, opt.at_least(0)] = 25
    persona: opt.PersonaName = None
    workloads: opt.WorkloadNames = None
    concurrency: Annotated[tuple[int, ...], opt.COMMA_SEPARATED] = (1,)
    rates: Annotated[
        tuple[float, ...], Parameter(name="--rate", converter=opt.split_at_commas, n_tokens=1)
    ] = ()
    prefix_cache: Literal["warm", "off"] = "warm"
    budget_s: Annotated[float | None, opt.POSITIVE] = None
    noise_share: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1))] = 0.1
    watch: Path | None = None
    reference_run: Path | None = None
    replay: tuple[Path, ...] = ()
    trace: Path | None = None
    trace_speed: Annotated[tuple[float, ...], opt.COMMA_SEPARATED] = (1,)
    trace_n: Annotated[int, opt.at_least(1)] = 200
    ladder: Annotated[tuple[str, ...], opt.COMMA_SEPARATED] = ()
    key_env: opt.KeyVariable = None
    seed: int = 0
    output: Path
    as_json: opt.AsJson = False


# Options that are settings of a benchmark under the same name (bench.run).
_SETTINGS = (
    "candidate",
    "reference",
    "incumbent",
    "warmup",
    "runs",
    "concurrency",
    "rates",
    "prefix_cache",
    "budget_s",
    "noise_share",
    "reference_run",
    "seed",
)


def bench(options: BenchOptions) -> None:
    """Time one or two OpenAI-compatible servers with the same prompts, interleaved.

    The candidate's gates are compared with the reference's answers, also those that need no labels (same_tool ...); without
    a bf16 side, with the incumbent's. Exit code 1 if the candidate loses a gate or is fragile, and where a confound leaves
    open what was compared.
    """
    from annie_quant import bench as timing
    from annie_quant.cli.pipeline.run_directory import RunDirectory
    from annie_quant.report.recheck import write_judgement

    output = options.output
    stored = options.watch
    if options.aa and options.backend_b:
        raise UsageError("--aa measures backend A against itself: remove --backend-b")
    if stored and not (stored / "bench.json").is_file():
        raise UsageError(
            f"--watch {stored}: it has no bench.json",
            "pass the folder of a finished annie-quant bench",
        )
    backends = backends_of(options)
    workloads = workloads_of(options)
    settings = opt.keywords_of(options, *_SETTINGS)
    if options.aa:
        settings |= {"candidate": backends[1].name, "incumbent": backends[0].name}
    if options.trace:
        settings["trace_speeds"] = options.trace_speed
    directory = RunDirectory(output)
    with directory.locked():
        with console.task("bench") as step:
            done = timing.run(backends, workloads, output, progress=step, **settings)
        directory.write_run(done.config, done.aggregates, done.verdict, done.environment)
        verdict = done.verdict
        if any(output.glob("eval/*.json")):  # evaluations without a server are part of the verdict
            verdict = write_judgement(output).verdict
        paths = annie_quant.report.build(output)
    compared = timing.regression(stored, output) if stored else None
    result = document(done.aggregates, verdict, paths[0], compared)
    if options.as_json:
        emit(result)
    else:
        console.print_lines(tables.verdict_lines(verdict, console.width))
        console.print_lines(["", *tables.served_lines(done.aggregates.served, console.width)])
        if PREFILL_WORKLOAD in done.config.workloads:
            console.print_lines(tables.prefill_lines(done.aggregates.prefill, console.width))
        console.print_lines(tables.reason_lines(verdict, console.width))
        console.print_report(result["report"])
    if compared:
        left_out = f"{len(compared.left_out)} prompts have another content than in {stored} and are left out: "
        notes = [left_out + ", ".join(compared.left_out[:3])] if compared.left_out else []
        notes += [*timing.losses(compared), *compared.caches]
        notes += [compared.machine] if compared.machine else []
        for line in (*notes, f"against {stored}: {compared.outcome}"):
            console.note(line)
    sys.exit(0 if verdict.passed and not (compared and compared.lost) else 1)


def backends_of(options: BenchOptions) -> list[Backend]:
    """Return the sides: A and B, or A twice."""
    from annie_quant.bench import Backend, key_headers

    name, url = options.backend_a
    second = options.backend_b
    if options.aa:
        second = (f"{name}-again", url)
    headers = key_headers(options.key_env)
    sides = [(name, url), *([second] if second else [])]
    backends = [Backend(name, url, headers=headers) for name, url in sides]
    return [dataclasses.replace(b, meta=local_process(b.url)) for b in backends]


def workloads_of(options: BenchOptions) -> list[Workload]:
    """Return the workloads of a persona or by name, then those of logs, a trace and ladders, or of these alone."""
    from annie_quant.bench import traces
    from annie_quant.data.workloads import ladder, resolve
    from annie_quant.documents.persona import load_persona
    from annie_quant.judge import tool_eval

    persona = load_persona(options.persona) if options.persona and options.ladder else None
    alone = options.ladder or ((options.replay or options.trace) and not options.persona)
    chosen = [] if alone and not options.workloads else resolve(options.persona, options.workloads)
    if options.n:
        whole = [w for w in chosen if w.name == tool_eval.NAME or w.has_lengths]
        rest = [w for w in chosen if w not in whole]
        chosen = [*annie_quant.judge.sample(rest, options.n, options.seed), *whole]
    if options.replay:
        chosen.append(traces.replay(options.replay, options.n or MOST_CONVERSATIONS, options.seed))
    if options.trace:
        chosen.append(traces.trace(options.trace, options.trace_n))
    for axis in options.ladder:
        chosen += ladder(axis, options.n or LADDER_PROMPTS, persona, options.seed)
    return chosen


def document(
    aggregates: Aggregates, verdict: Verdict, report: Path, compared: Regression | None
) -> dict[str, object]:
    """Return what --json prints."""
    result = msgspec.structs.asdict(verdict) | {
        "roles": aggregates.roles,
        "gates": {name: side.gates for name, side in aggregates.served.items()},
        "paired": {name: side.paired for name, side in aggregates.served.items() if side.judged_by},
        "prefill": aggregates.prefill,
        "report": str(report),
    }
    if compared:
        fields = (
            "outcome",
            "worse",
            "better",
            "gates_lost",
            "silent",
            "left_out",
            "machine",
            "caches",
        )
        result["regression"] = {k: getattr(compared, k) for k in fields}
    return msgspec.to_builtins(result)


def local_process(url: str) -> dict[str, int]:
    """Return {"pid": ...} of the process that listens at a loopback URL; {} where it is not known."""
    from annie_quant.core.host import is_local, listening_pid

    parts = urllib.parse.urlsplit(url)
    if not is_local(parts.hostname or ""):
        return {}
    pid = listening_pid(parts.port or 80)
    return {} if pid is None else {"pid": pid}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AttributeOptions:
    """Options of `annie-quant attribute`.

    Attributes:
        checkpoint: The suspect's weights: a folder, or a GGUF file for llama.cpp.
        reference: Weights that are taken for right: bf16.
        runtime: vllm, sglang or llama.cpp.
        use: Recipe of vLLM or SGLang. Default: the newest.
        server_cmd: Starts a server; {port} and {FACTOR} are replaced.
        urls: Two running servers.
        suspect: A value that is suspected; repeatable.
        trusted: The value to compare with; repeatable.
        n: Prompts per gate; 0: all.
        arms: Settings to measure at most.
        timeout_s: Limit of one request, in seconds.
        seed: Of the choice and order of the prompts.
        output: Run directory; the same command resumes from it.
    """

    checkpoint: Path | None = None
    reference: Path | None = None
    runtime: str = "llama.cpp"
    use: str | None = None
    server_cmd: str | None = None
    urls: tuple[str, str] | None = None
    suspect: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    persona: opt.PersonaName = None
    workloads: opt.WorkloadNames = None
    n: Annotated[int, opt.at_least(0)] = 25
    arms: Annotated[int, opt.at_least(4)] = 12
    timeout_s: Annotated[float, opt.at_least(1)] = 120.0
    key_env: opt.KeyVariable = None
    seed: int = 0
    output: Path
    as_json: opt.AsJson = False


def attribute(options: AttributeOptions) -> None:
    """Find out which setting breaks a served model's answers.

    Servers that differ in some factors (weights, activations, template, parser, kv, mtp, prefix, graphs, batch, sampling) get the
    same prompts, at most --arms times: first halves of the factors, then pairs. They are started here, by --checkpoint and
    --runtime or by --server-cmd, or run already (--urls). Exit code 1 if something is to blame or open.
    """
    from annie_quant.bench import key_headers
    from annie_quant.cli.pipeline.run_directory import RunDirectory
    from annie_quant.data.workloads import resolve
    from annie_quant.ops import attribution

    target = target_of(options)
    workloads = resolve(options.persona, options.workloads)
    if options.n:
        workloads = annie_quant.judge.sample(workloads, options.n, options.seed)
    with RunDirectory(options.output).locked(), console.task("attribute") as step:
        headers = key_headers(options.key_env)
        limits = (options.arms, options.timeout_s, options.seed)
        result = attribution.AttributionRun(
            target, workloads, options.output, headers, *limits, step
        ).run()
    if options.as_json:
        emit(result)
    else:
        for line in (*(f"- {line}" for line in attribution.lines(result)), result.sentence):
            console.print_lines(tables.wrap(line, console.width))
    sys.exit(1 if result.guilty or result.conclusion.unfinished else 0)


def target_of(options: AttributeOptions) -> Target:
    """Return the servers that the options name. Raises UsageError unless they name one kind."""
    from annie_quant.ops import attribution_servers as servers

    trusted = choices("--trusted", options.trusted)
    suspect = choices("--suspect", options.suspect)
    if (options.checkpoint is not None) + (options.server_cmd is not None) + (
        options.urls is not None
    ) != 1:
        raise UsageError("give one of --checkpoint, --server-cmd and --urls")
    if options.server_cmd is not None:
        return servers.CommandTarget(options.server_cmd, trusted, suspect)
    if options.urls is not None:
        return servers.UrlTarget(*options.urls, trusted, suspect)
    assert options.checkpoint is not None
    models = options.checkpoint, options.reference
    return servers.RuntimeTarget(
        options.runtime, models, (trusted, suspect), options.output, options.use
    )


def choices(option: str, values: Sequence[str]) -> dict[str, str]:
    """Return {factor: value}. Raises UsageError for what is not FACTOR=VALUE, or repeats a factor."""
    result: dict[str, str] = {}
    for item in values:
        name, separator, value = item.partition("=")
        if not separator or name in result:
            problem = "is repeated" if separator else "has no value"
            raise UsageError(
                f"{option} {item}: {name!r} {problem}",
                f"write it as {option} {shlex.quote(name)}=VALUE",
            )
        result[name] = value
    return result
