"""`annie-quant capacity`: the highest rate of requests at which a server meets limits on TTFT and ITL."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from annie_quant.cli.common import console, emit, json_option, persona_option
from annie_quant.errors import UsageError


@click.command()
@click.option("--backend-a", nargs=2, required=True, metavar="NAME URL", help="A name for the figures, and the server.")
@click.option("--backend-b", nargs=2, metavar="NAME URL", help="A second server.")
@click.option(
    "--ttft-ms", type=click.FloatRange(0, min_open=True), help="Limit on the time to the first content or tool call."
)
@click.option(
    "--itl-ms", type=click.FloatRange(0, min_open=True), help="Limit on a request's mean time between tokens."
)
@click.option("--share", default=0.95, show_default=True, help="Share of the requests that must meet the limits.")
@click.option(
    "--workload", default="greeting", show_default=True, help="Name or file of the workload whose prompts are sent."
)
@persona_option
@click.option("--budget-s", type=float, help="Stop after this many seconds; the same command resumes.")
@click.option("--key-env", metavar="NAME", help="Environment variable with the API key of both servers.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Run directory; an interrupted search resumes."
)
@json_option
def capacity(
    backend_a: tuple[str, str],
    backend_b: tuple[str, str] | None,
    ttft_ms: float | None,
    itl_ms: float | None,
    share: float,
    workload: str,
    persona: str | None,
    budget_s: float | None,
    key_env: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Search the highest rate of arrivals (Poisson) at which --share of the requests meet the limits, by bisection.

    Each rate is sent until a sequential test decides it. The interval is from the highest rate that surely meets the limits to
    the lowest that surely does not.
    """
    from annie_quant import bench as timing
    from annie_quant.bench.capacity import Limits, run
    from annie_quant.data.resolve import resolve
    from annie_quant.pipeline.run_directory import RunDirectory

    limits = Limits(ttft_ms, itl_ms, share)
    headers = timing.key_headers(key_env)
    backends = [timing.Backend(name, url, headers=headers) for name, url in filter(None, (backend_a, backend_b))]
    chosen = resolve(persona, workload)
    if len(chosen) != 1:
        raise UsageError(
            f"a capacity is of one workload, got {len(chosen)}", "annie-quant capacity --workload greeting ..."
        )
    with RunDirectory(output).locked(), console.task("capacity") as step:
        result = run(backends, chosen[0], output, limits, budget_s=budget_s, progress=step)
    if as_json:
        emit(msgspec.to_builtins(result))
        return
    for name, row in result.capacities.items():
        console.print_lines([f"{name}: {row.sentence}"])
        if not row.complete:
            console.note(f"{name}: the time budget ended the search; the same command continues it")
