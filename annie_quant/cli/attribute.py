"""`annie-quant attribute`: who is to blame when a served model lost its manners."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

import annie_quant
from annie_quant.cli.options import AsJson, KeyVariable, Option, PersonaName, WorkloadNames, command
from annie_quant.cli.tables import wrap
from annie_quant.cli.terminal import console, emit
from annie_quant.core.errors import UsageError

if TYPE_CHECKING:
    from annie_quant.ops.attribution_servers import Target


class AttributeOptions(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: Annotated[Path | None, Option("The suspect's weights: a folder, or a GGUF file for llama.cpp.")] = None
    reference: Annotated[Path | None, Option("Weights that are taken for right: bf16.")] = None
    runtime: Annotated[str, Option("vllm, sglang or llama.cpp.")] = "llama.cpp"
    use: Annotated[str | None, Option("Recipe of vLLM or SGLang. Default: the newest.", metavar="RECIPE")] = None
    server_cmd: Annotated[str | None, Option("Starts a server; {port} and {FACTOR} are replaced.", metavar="CMD")] = (
        None
    )
    urls: Annotated[tuple[str, str] | None, Option("Two running servers.", metavar="TRUSTED SUSPECT")] = None
    suspect: Annotated[tuple[str, ...], Option("A value that is suspected; repeatable.", metavar="FACTOR=VALUE")] = ()
    trusted: Annotated[tuple[str, ...], Option("The value to compare with; repeatable.", metavar="FACTOR=VALUE")] = ()
    persona: PersonaName = None
    workloads: WorkloadNames = None
    n: Annotated[int, Option("Prompts per gate; 0: all.", least=0)] = 25
    arms: Annotated[int, Option("Settings to measure at most.", least=4)] = 12
    timeout_s: Annotated[float, Option("Limit of one request, in seconds.", least=1)] = 120.0
    key_env: KeyVariable = None
    seed: Annotated[int, Option("Of the choice and order of the prompts.")] = 0
    output: Annotated[Path, Option("Run directory; the same command resumes from it.")]
    as_json: AsJson = False


@command(AttributeOptions)
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
        headers, limits = key_headers(options.key_env), (options.arms, options.timeout_s, options.seed)
        result = attribution.AttributionRun(target, workloads, options.output, headers, *limits, step).run()
    if options.as_json:
        emit(result)
    else:
        for line in (*(f"- {line}" for line in attribution.lines(result)), result.sentence):
            console.print_lines(wrap(line, console.width))
    sys.exit(1 if result.guilty or result.conclusion.unfinished else 0)


def target_of(options: AttributeOptions) -> Target:
    """Return the servers that the options name. Raises UsageError unless they name one kind."""
    from annie_quant.ops import attribution_servers as servers

    trusted, suspect = choices("--trusted", options.trusted), choices("--suspect", options.suspect)
    if (options.checkpoint is not None) + (options.server_cmd is not None) + (options.urls is not None) != 1:
        raise click.UsageError("give one of --checkpoint, --server-cmd and --urls")
    if options.server_cmd is not None:
        return servers.CommandTarget(options.server_cmd, trusted, suspect)
    if options.urls is not None:
        return servers.UrlTarget(*options.urls, trusted, suspect)
    assert options.checkpoint is not None
    models = options.checkpoint, options.reference
    return servers.RuntimeTarget(options.runtime, models, (trusted, suspect), options.output, options.use)


def choices(option: str, values: Sequence[str]) -> dict[str, str]:
    """Return {factor: value}. Raises UsageError for what is not FACTOR=VALUE, or repeats a factor."""
    result: dict[str, str] = {}
    for item in values:
        name, separator, value = item.partition("=")
        if not separator or name in result:
            problem = "is repeated" if separator else "has no value"
            raise UsageError(f"{option} {item}: {name!r} {problem}", f"write it as {option} {shlex.quote(name)}=VALUE")
        result[name] = value
    return result
