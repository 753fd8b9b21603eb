"""The annie-quant command. Data goes to stdout, notes and progress to stderr; exit codes are in annie_quant.errors."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

import annie_quant
from annie_quant.commands import console, emit, json_option, refuse_stale_prompt
from annie_quant.commands.checkpoint import audit, compare, convert
from annie_quant.commands.data import data
from annie_quant.commands.search import search
from annie_quant.errors import AnnieError


class Commands(click.Group):
    """Lists commands in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(annie_quant.__version__, prog_name="annie-quant")
def cli() -> None:
    """Fine-tuned Qwen3.5 to NVFP4 with its manners intact: quantize, prove, serve, time, report."""


@cli.command()
@click.option(
    "--output",
    default="runs/demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Run directory; a finished stage is not done again.",
)
@click.option("--n-offline", default=25, show_default=True, help="Prompts a gate in the offline evaluation.")
@click.option("--n-served", default=100, show_default=True, help="Prompts a gate on the servers.")
def demo(output: Path, n_offline: int, n_served: int) -> None:
    """Run the whole line on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant import demo as line

    verdict = line.run(output, n_offline=n_offline, n_served=n_served, console=console)
    console.print_verdict(verdict)


cli.add_command(data)


@cli.command()
@click.option("--strategy", required=True, help="naive, direct, mlp_only, ... (an unknown name prints the list).")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="Folder of the bf16 checkpoint.")
@click.option("--calib-data", type=click.Path(path_type=Path), help="JSON lines of conversations (annie-quant data).")
@click.option("--calib-samples", default=512, show_default=True)
@click.option(
    "--exclude-layers",
    default="",
    help='Parts that stay as they are, e.g. "linear_attn,layers.0,layers.31", or fnmatch patterns.',
)
@click.option(
    "--scale",
    help="Block scales where our codec chooses them: amax, four_over_six, sweep. Default: the strategy's own.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A strategy's own setting; repeatable.")
@click.option("--ray", metavar="ADDRESS", help='direct: make the shards on this Ray cluster ("local" starts one here).')
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@click.option("--allow-prompt-mismatch", is_flag=True, help="Go on with data made for another system prompt.")
@click.option("--container", is_flag=True, help="Do it in NVIDIA's container, as the calling user.")
@click.option("--dry-run", is_flag=True, help="Print size, memory and time to expect (--model 9b and 27b work too), or "
              "with --container the one command, and stop.")  # fmt: skip
@json_option
def quantize(
    strategy: str,
    model: Path,
    calib_data: Path | None,
    calib_samples: int,
    exclude_layers: str,
    scale: str | None,
    settings: tuple[str, ...],
    ray: str | None,
    seed: int,
    output: Path,
    force: bool,
    allow_prompt_mismatch: bool,
    container: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Quantize a bf16 checkpoint to NVFP4 by one strategy."""
    from annie_quant.quantize import container as ngc
    from annie_quant.quantize import sizes

    loose = [item for item in settings if "=" not in item]
    if loose:
        raise click.UsageError(f"--set {loose[0]}: expected NAME=VALUE")
    if container:
        more = ["--calib-samples", str(calib_samples), "--seed", str(seed)]
        more += ["--exclude-layers", exclude_layers] if exclude_layers else []
        more += ["--scale", scale] if scale else []
        more += [word for item in settings for word in ("--set", item)]
        more += [flag for flag, on in (("--force", force), ("--allow-prompt-mismatch", allow_prompt_mismatch)) if on]
        argv = ngc.arguments(strategy, model, output, calib_data, more)
        if dry_run:
            click.echo(shlex.join(argv))
            return
        sys.exit(ngc.run(argv, output))
    if dry_run or sizes.large(model):
        for line in sizes.plan(model, strategy, calib_samples).lines():
            click.echo(line, err=not dry_run)
    if dry_run:
        return
    refuse_stale_prompt(calib_data, allow_prompt_mismatch)
    with console.task(f"quantize ({strategy})") as step:
        result = annie_quant.quantize.run(
            strategy,
            model,
            output,
            calib_data=calib_data,
            calib_samples=calib_samples,
            exclude=exclude_layers,
            scale=scale,
            force=force,
            report=step.say,
            seed=seed,
            allow_prompt_mismatch=allow_prompt_mismatch,
            **dict(item.split("=", 1) for item in settings) | ({"ray": ray} if ray else {}),
        )
    megabytes = {k: result[k] / 1e6 for k in ("size_bytes", "source_bytes")}
    emit(result) if as_json else console.note(
        "{output}: {seconds} s, ".format(**result)
        + "{size_bytes:.1f} MB from {source_bytes:.1f} MB".format(**megabytes)
    )


for part in (audit, convert, compare):
    cli.add_command(part)


@cli.command(name="eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--reference", required=True, type=click.Path(path_type=Path), help="The bf16 checkpoint.")
@click.option("--n", default=100, show_default=True, help="Prompts a gate.")
@click.option("--numerics", default="w4a4,w4a16", show_default=True)
@click.option(
    "--calib-data", type=click.Path(path_type=Path), help="Conversations whose assistant tokens are scored too."
)
@click.option("--text", type=click.Path(path_type=Path), help="A plain text file: perplexity and KL over all of it.")
@click.option("--layers", is_flag=True, help="Also measure which layers the divergence comes from; draws a plot.")
@click.option("--layers-n", default=10, show_default=True, help="Prompts a gate for --layers.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write; --layers goes on from beside it.")
@click.option("--allow-prompt-mismatch", is_flag=True, help="Go on with data made for another system prompt.")
@json_option
def evaluate(
    checkpoint: Path,
    reference: Path,
    n: int,
    numerics: str,
    calib_data: Path | None,
    text: Path | None,
    layers: bool,
    layers_n: int,
    output: Path | None,
    allow_prompt_mismatch: bool,
    as_json: bool,
) -> None:
    """Judge a checkpoint against its bf16 reference without a server: gates, KL. Exit code 1 if a gate fails.

    Under torchrun or accelerate launch the processes share the work, and the first one prints and writes.
    """
    from annie_quant.quantize.prompt import check_checkpoint
    from annie_quant.runtime import cli_eval

    refuse_stale_prompt(calib_data, allow_prompt_mismatch)
    personas = (w.persona for w in annie_quant.judge.load_workloads() if w.persona)
    differs = check_checkpoint(checkpoint, personas, allow=allow_prompt_mismatch)
    if differs:
        console.note(differs)
    with console.task("evaluate") as step:
        result = cli_eval.run(
            checkpoint,
            reference,
            numerics=numerics.split(","),
            n=n,
            conversations=calib_data,
            text=text,
            layers_n=layers_n if layers else None,
            output=output,
            progress=step,
        )
    if cli_eval.first_process():
        emit(result) if as_json else console.print_gates(
            {f"{checkpoint.name} {k}": v["gates"] for k, v in result["numerics"].items()}
        )
        if not as_json:
            for line in cli_eval.lines(result):
                console.note(line)
    cli_eval.finish()
    gates = [g for side in result["numerics"].values() for g in side["gates"].values() if not g.get("advisory")]
    sys.exit(1 if any(g["verdict"] == "fail" for g in gates) else 0)


cli.add_command(search)


@cli.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--runtime", default="llama.cpp", show_default=True, help="vllm, sglang or llama.cpp.")
@click.option("--port", default=8000, show_default=True)
@click.option(
    "--use", help='A dated recipe of vLLM or SGLang: "2026-11-27b", "2026-11-mtp", "cpu" ...; default: the newest.'
)
@click.option("--recipe", type=click.Path(path_type=Path), help="Write the recipe as YAML (sparkrun) and stop.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def serve(model: Path, runtime: str, port: int, use: str | None, recipe: Path | None, dry_run: bool) -> None:
    """Serve a checkpoint (or a GGUF file) and wait until Ctrl-C."""
    options: dict[str, Any] = {"recipe": use} if use else {}
    if recipe:
        click.echo(str(annie_quant.serve.write_recipe(model, recipe, runtime=runtime, port=port, **options)))
    if dry_run:
        click.echo(annie_quant.serve.command(model, runtime=runtime, port=port, **options))
    if recipe or dry_run:
        return
    with console.task(f"{runtime} on port {port}") as step:
        server = annie_quant.serve.start(model, runtime=runtime, port=port, say=step.say, **options)
    console.note(f"ready: {server.url}/v1   (Ctrl-C stops it)")
    try:
        server.wait()
    finally:
        server.stop()


@cli.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--log", type=click.Path(path_type=Path), help="A server's log, held against the known errors.")
@click.option("--fix-plan", is_flag=True, help="Print the commands that mend what was found, and nothing else.")
@json_option
def doctor(model: Path | None, log: Path | None, fix_plan: bool, as_json: bool) -> None:
    """Say what this machine (and a checkpoint) lacks for which stage, and the command that mends it. Exit 3 on a fault."""
    from annie_quant import doctor as house

    findings = house.examine(model, log)
    plan = house.fix_plan(findings)
    if as_json:
        emit({"findings": findings, "fix_plan": plan})
    elif fix_plan:
        click.echo("\n".join(plan))
    else:
        console.print_doctor(findings)
    sys.exit(3 if any(f["level"] == "fault" for f in findings) else 0)


@cli.command(name="validate-gpu")
@click.option("--bench", "with_bench", is_flag=True, help="Also time the kernels against the measured bandwidth.")
@click.option(
    "--stack", help="Also judge the installed serving stack's own FP4 kernels: vllm, flashinfer, torch or all."
)
@click.option("--container", metavar="NAME_OR_IMAGE", help="Judge the stack in there: a running container or an image.")
@click.option("--dry-run", is_flag=True, help="With --container: print its command and start nothing.")
@json_option
def validate_gpu(with_bench: bool, stack: str | None, container: str | None, dry_run: bool, as_json: bool) -> None:
    """Prove NVFP4 arithmetic on this GPU against a float64 oracle. Exit code 3 where there is no GPU."""
    if (container is None and dry_run) or (container is not None and with_bench):
        raise click.UsageError("--dry-run goes with --container, and --bench without")
    if container is not None:
        from annie_quant.gemm import container as inside

        if dry_run:
            click.echo(shlex.join(inside.plan(container, stack or "all")))
            return
        seen = inside.examine(container, stack or "all")
        emit(seen) if as_json else console.print_mapping("stack", seen)
        sys.exit(1 if seen["wrong"] else 0)
    result = annie_quant.gemm.validate(bench=with_bench, stack=stack)
    emit(result) if as_json else console.print_validation(result)
    sys.exit(0 if result.get("ok") else 1)


@cli.command()
@click.option("--backend-a", nargs=2, required=True, metavar="NAME URL")
@click.option("--backend-b", nargs=2, metavar="NAME URL")
@click.option("--aa", is_flag=True, help="Measure backend A against itself: the noise floor.")
@click.option("--warmup", default=2, show_default=True, help="Requests a workload that are not counted.")
@click.option("--runs", default=5, show_default=True, help="Times that each prompt is measured.")
@click.option("--n", default=25, show_default=True, help="Prompts a gate (100 and more decide); 0: all there are.")
@click.option("--workloads", help="Names (bfcl too) or JSON files, comma-separated; default: the default ones.")
@click.option("--concurrency", default="1", show_default=True, help='Requests in flight; several: "1,8".')
@click.option("--rate", default="", help='Arrivals a second (Poisson, open loop) as further loads: "0.5,2".')
@click.option("--prefix-cache", default="warm", show_default=True, type=click.Choice(["warm", "off"]))
@click.option("--budget-s", type=float, help="Stop after so many seconds; the same command goes on.")
@click.option("--stop-early", is_flag=True, help="Stop when every gate and comparison is decided.")
@click.option("--watch", "stored", type=click.Path(path_type=Path), help="A stored run: exit 1 on a significant loss.")
@click.option("--key-env", metavar="NAME", help="Environment variable with the API key of both servers.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Run directory; an interrupted run goes on from it.",
)
@json_option
def bench(
    backend_a: tuple[str, str],
    backend_b: tuple[str, str] | None,
    aa: bool,
    n: int,
    workloads: str | None,
    concurrency: str,
    rate: str,
    stored: Path | None,
    key_env: str | None,
    output: Path,
    as_json: bool,
    **settings: Any,
) -> None:
    """Time one or two OpenAI-compatible servers over the same prompts, interleaved. Exit code 1 if a gate fails."""
    from annie_quant import bench as timing
    from annie_quant.bench.live import Board
    from annie_quant.rundir import RunDirectory

    if aa and backend_b:
        raise click.UsageError("--aa measures backend A against itself: leave --backend-b out")
    sides = [backend_a, (f"{backend_a[0]}-again", backend_a[1])] if aa else [backend_a, backend_b]
    headers = timing.key_headers(key_env)
    backends = [timing.Backend(name, url, headers=headers) for name, url in filter(None, sides)]
    chosen = annie_quant.judge.load_workloads(workloads.split(",") if workloads else None)
    if n:
        chosen = annie_quant.judge.sample(chosen, n, settings["seed"])
    settings["concurrency"], settings["rates"] = numbers(concurrency, int), numbers(rate, float)
    directory, board = RunDirectory(output), Board([b.name for b in backends])
    with directory.locked(), board.shown(console):
        done = timing.run(backends, chosen, output, progress=board.step, watch=board.add, **settings)
    directory.write_run(done["config"], done["aggregates"], done["verdict"], done["environment"])
    paths = annie_quant.report.build(output)
    gates = {name: side["gates"] for name, side in done["aggregates"]["served"].items()}
    verdict = done["verdict"] | {"gates": gates, "report": str(paths[0])}
    lost = timing.regression(stored, output) if stored else None
    if lost:
        verdict |= {"regression": {k: lost[k] for k in ("worse", "better", "gates_lost")}}
    emit(verdict) if as_json else console.print_verdict(verdict)
    for line in timing.losses(lost) if lost else ():
        console.note(line)
    sys.exit(0 if verdict["passed"] and not (lost and (lost["worse"] or lost["gates_lost"])) else 1)


def numbers(text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise click.UsageError(f"{text!r} is no list of numbers; write it as 1,8") from None


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Of several runs: where the trends go. Default: trends")
def report(run_dirs: tuple[Path, ...], output: Path | None) -> None:
    """Write report.html, report.md and comparison.md into a run directory; of several, trends.html and trends.md."""
    from annie_quant.report import trends

    if len(run_dirs) == 1 and output is not None:
        raise click.UsageError("--output is for the trends of several runs; the report of one lies in its folder")
    several = len(run_dirs) > 1
    paths = trends.build(run_dirs, output or Path("trends")) if several else annie_quant.report.build(run_dirs[0])
    for path in paths:
        click.echo(str(path))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--repo", required=True, metavar="OWNER/NAME", help="Repository on the Hub; made where there is none.")
@click.option("--model", help="Its name in the run. Default: the verdict's candidate.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Its folder, where the run does not know it.")
@click.option("--base-model", metavar="OWNER/NAME", help="The Hub model that this was made from.")
@click.option("--license", "licence", default="", help="The base model's licence, as the Hub spells it: apache-2.0.")
@click.option("--calib-data", type=click.Path(path_type=Path), help="Default: calibration.jsonl of the run.")
@click.option("--public", is_flag=True, help="Make the repository public (private by default).")
@click.option("--with-report", is_flag=True, help="Also upload the report and results.csv.")
@click.option("--with-records", is_flag=True, help="Also upload every request and answer.")
@click.option("--force", default="", metavar="REASON", help="Publish in spite of failures; the card gives the reason.")
@click.option("--dry-run", is_flag=True, help="List files and sizes, write the card, upload nothing.")
@json_option
def publish(
    run_dir: Path,
    repo: str,
    model: str | None,
    checkpoint: Path | None,
    base_model: str | None,
    licence: str,
    calib_data: Path | None,
    public: bool,
    with_report: bool,
    with_records: bool,
    force: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a run's checkpoint to the Hugging Face Hub with its model card. Exit code 1 if something speaks against it."""
    from annie_quant.report import publish as hub
    from annie_quant.report.text import size

    with console.task("audit and card"):
        plan = hub.prepare(
            run_dir,
            repo,
            model=model,
            checkpoint=checkpoint,
            base_model=base_model,
            license=licence,
            calib_data=calib_data,
            private=not public,
            with_report=with_report,
            with_records=with_records,
            forced=force,
        )
    if not as_json:
        for name, size_bytes in plan.files:
            click.echo(f"{size(size_bytes):>10}  {name}")
        console.note(
            f"{len(plan.files)} files, {size(plan.size_bytes)}, to {repo} ({'public' if public else 'private'})"
        )
        console.note(f"the card: {plan.folder / 'README.md'}")
        for line in plan.objections:
            console.note(f"against it: {line}")
    if dry_run or plan.refused:
        emit(plan.to_dict()) if as_json else None
        if plan.refused and not as_json:
            console.error("refused", 'mend what speaks against it, or say why not: --force "REASON"')
        sys.exit(1 if plan.refused else 0)
    done = hub.upload(plan, say=console.note)
    emit(plan.to_dict() | done) if as_json else console.note(f"uploaded: {done['url']}")


def main() -> None:
    """The entry point: one clear line for what can be expected, a traceback only with ANNIE_QUANT_TRACEBACK=1."""
    # Idle OpenMP threads (torch's and the codec's) spin by default; beside servers on a few cores that costs minutes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli.main(standalone_mode=False)
    except AnnieError as error:
        if os.environ.get("ANNIE_QUANT_TRACEBACK"):
            raise
        console.error(error.message, error.hint)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        console.error("interrupted; what is finished is kept", "run the same command again to go on")
        sys.exit(130)
    except Exception as error:
        full = disk_is_full(error)
        if os.environ.get("ANNIE_QUANT_TRACEBACK") or not (full or isinstance(error, OSError)):
            raise
        if full:
            console.error("the disk is full; what is finished is kept", "free some, then run the same command again")
        elif isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            console.error(f"{where}{error.strerror or error}", "set ANNIE_QUANT_TRACEBACK=1 to see where")
        sys.exit(3)


def disk_is_full(error: BaseException | None) -> bool:
    """Whether this, or what it came from, is ENOSPC; libraries wrap it in exceptions of their own."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
