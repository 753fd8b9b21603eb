"""`annie-quant bench`: time one or two servers with the same prompts."""

from __future__ import annotations

import math
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

import annie_quant
from annie_quant.cli import tables
from annie_quant.cli.common import PATH, console, emit, json_option, persona_option, role_options, workloads_option
from annie_quant.core.errors import UsageError

SUSTAINED_PER_S = 20  # visits that are planned; a sustained run ends by its time
MOST_CONVERSATIONS = 10_000
Number = TypeVar("Number", int, float)


@click.command()
@click.option("--backend-a", nargs=2, required=True, metavar="NAME URL", help="A name for the figures, and the server.")
@click.option("--backend-b", nargs=2, metavar="NAME URL", help="A second server.")
@role_options
@click.option("--aa", is_flag=True, help="Measure backend A against itself: the noise floor.")
@click.option("--warmup", default=2, show_default=True, help="Requests per workload that are not counted.")
@click.option("--runs", default=5, show_default=True, help="Measurements per prompt.")
@click.option(
    "--n",
    type=click.IntRange(0),
    default=25,
    show_default=True,
    help="Prompts per gate (52 without a lost answer decide a gate, with lost ones more); 0: all.",
)
@persona_option
@workloads_option
@click.option("--concurrency", default="1", show_default=True, help='Requests in flight; several loads: "1,8".')
@click.option("--rate", default="", help='Additional loads in arrivals per second (Poisson, open loop): "0.5,2".')
@click.option(
    "--prefix-cache",
    default="warm",
    show_default=True,
    type=click.Choice(["warm", "off"]),
    help="off: ask each server not to reuse earlier prompts.",
)
@click.option("--budget-s", type=float, help="Stop after this many seconds; the same command resumes.")
@click.option(
    "--noise-share",
    type=click.FloatRange(0, 1),
    default=0.1,
    show_default=True,
    help="With --runs 1: share of the prompts that is measured twice, for the noise floor.",
)
@click.option(
    "--sustain-s",
    type=click.FloatRange(1),
    help="Repeat the prompts for this long (an hour: 3600): throttling, drift, and the growth of local servers' memory.",
)
@click.option("--stop-early", is_flag=True, help="Stop when all gates and comparisons are decided.")
@click.option("--watch", "stored", type=PATH, help="An earlier run: exit 1 on a significant loss.")
@click.option(
    "--reference-run",
    type=PATH,
    help="An earlier run with a bf16 side: all sides are compared with its answers (--reference: its name there).",
)
@click.option(
    "--replay",
    "logs",
    multiple=True,
    type=PATH,
    help="Chat logs: their conversations, turn by turn, with the logged results of tools; repeatable.",
)
@click.option("--trace", type=PATH, help="A Mooncake trace, or a log with times: its requests, arriving when they did.")
@click.option("--trace-speed", default="1", show_default=True, help='How many times as fast the trace runs: "1,4".')
@click.option("--trace-n", type=click.IntRange(1), default=200, show_default=True, help="Requests of the trace.")
@click.option(
    "--endpoint-a",
    default="chat",
    show_default=True,
    metavar="API",
    help="API of backend A: chat, completions, responses, messages or ollama.",
)
@click.option("--endpoint-b", default="chat", show_default=True, metavar="API", help="API of backend B.")
@click.option("--key-env", metavar="NAME", help="Environment variable with the API key of both servers.")
@click.option("--seed", default=0, show_default=True, help="Of the choice and order of the prompts.")
@click.option("--output", required=True, type=PATH, help="Run directory; an interrupted run resumes from it.")
@json_option
def bench(
    backend_a: tuple[str, str],
    backend_b: tuple[str, str] | None,
    aa: bool,
    n: int,
    persona: str | None,
    workloads: str | None,
    concurrency: str,
    rate: str,
    sustain_s: float | None,
    stored: Path | None,
    logs: tuple[Path, ...],
    trace: Path | None,
    trace_speed: str,
    trace_n: int,
    endpoint_a: str,
    endpoint_b: str,
    key_env: str | None,
    output: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Time one or two OpenAI-compatible servers with the same prompts, interleaved.

    The candidate's gates are compared with the reference's answers, also those that need no labels (same_tool ...); without
    a bf16 side, with the incumbent's. Exit code 1 if the candidate loses a gate or is fragile, and where a confound leaves
    open what was compared.
    """
    from annie_quant import bench as timing
    from annie_quant.bench import traces
    from annie_quant.cli.pipeline.run_directory import RunDirectory
    from annie_quant.data.workloads import resolve
    from annie_quant.report.recheck import write_judgement

    if aa and backend_b:
        raise click.UsageError("--aa measures backend A against itself: remove --backend-b")
    again = f"{backend_a[0]}-again"
    sides = [backend_a, (again, backend_a[1])] if aa else [backend_a, backend_b]
    if stored and not (stored / "bench.json").is_file():
        raise UsageError(f"--watch {stored}: it has no bench.json", "pass the folder of a finished annie-quant bench")
    if aa:
        settings |= {"candidate": again, "incumbent": backend_a[0]}
    headers = timing.key_headers(key_env)
    endpoints = (endpoint_a, endpoint_a if aa else endpoint_b)
    backends = [
        timing.Backend(*side, headers=headers, endpoint=endpoint, meta=local_process(side[1]) if sustain_s else {})
        for side, endpoint in zip(sides, endpoints, strict=True)
        if side
    ]
    only_logs = (logs or trace) and not persona and not workloads
    chosen = [] if only_logs else resolve(persona, workloads)
    if n:
        chosen = annie_quant.judge.sample(chosen, n, settings["seed"])
    if logs:
        chosen.append(traces.replay(logs, n or MOST_CONVERSATIONS, settings["seed"]))
    if trace:
        chosen.append(traces.trace(trace, trace_n))
        settings["trace_speeds"] = numbers(trace_speed, float)
    if sustain_s:
        requests = sum(max(1, len(w.cases)) for w in chosen) * len(backends)
        settings |= {
            "budget_s": sustain_s,
            "sustained": True,
            "runs": max(2, math.ceil(SUSTAINED_PER_S * sustain_s / requests)),
        }
    settings["concurrency"], settings["rates"] = numbers(concurrency, int), numbers(rate, float)
    directory = RunDirectory(output)
    with directory.locked():
        with console.task("bench") as step:
            done = timing.run(backends, chosen, output, progress=step, **settings)
        directory.write_run(done.config, done.aggregates, done.verdict, done.environment)
        verdict = done.verdict
        if any(output.glob("eval/*.json")):  # evaluations without a server are part of the verdict
            verdict = write_judgement(output).verdict
        paths = annie_quant.report.build(output)
    served = done.aggregates.served
    result = msgspec.structs.asdict(verdict) | {
        "roles": done.aggregates.roles,
        "gates": {name: side.gates for name, side in served.items()},
        "paired": {name: side.paired for name, side in served.items() if side.judged_by},
        "report": str(paths[0]),
    }
    compared = timing.regression(stored, output) if stored else None
    if compared:
        fields = ("outcome", "worse", "better", "gates_lost", "silent", "left_out")
        result["regression"] = {k: getattr(compared, k) for k in fields}
    result = msgspec.to_builtins(result)
    if as_json:
        emit(result)
    else:
        console.print_lines(tables.served_lines(served, console.width))
        console.print_verdict(result)
    if compared and compared.left_out:
        console.note(
            f"{len(compared.left_out)} prompts have another content than in {stored} and are left out: "
            + ", ".join(compared.left_out[:3])
        )
    for line in timing.losses(compared) if compared else ():
        console.note(line)
    if compared:
        console.note(f"against {stored}: {compared.outcome}")
    sys.exit(0 if verdict.passed and not (compared and compared.lost) else 1)


def local_process(url: str) -> dict[str, int]:
    """Return {"pid": ...} of the process that listens at a loopback URL; {} where it is not known."""
    from annie_quant.core.host import is_local, listening_pid

    parts = urllib.parse.urlsplit(url)
    if not is_local(parts.hostname or ""):
        return {}
    pid = listening_pid(parts.port or 80)
    return {} if pid is None else {"pid": pid}


def numbers(text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Parse a comma-separated list of numbers."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise click.UsageError(f"{text!r} is not a list of numbers; write it as 1,8") from None
