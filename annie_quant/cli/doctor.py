"""The commands that check this machine: `doctor`, `validate-gpu` and `--version`.

`annie-quant doctor`: what this machine lacks, and how to fix it.

`annie-quant validate-gpu`: is NVFP4 arithmetic right on this GPU?

`annie-quant --version`: one line; with --verbose the C modules and extras, and the commands that install the rest.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

import annie_quant
from annie_quant import __version__
from annie_quant.cli.options import AsJson, KeyVariable
from annie_quant.cli.terminal import console, echo, emit, quiet_engines
from annie_quant.core import native
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.templates import render_text
from annie_quant.core.untrusted import JsonObject

if TYPE_CHECKING:
    from annie_quant.core.progress import Progress
    from annie_quant.gemm.stack_check import BackendResult, StackResult
    from annie_quant.gemm.validate import Validation
    from annie_quant.ops.doctor import CheckResult

_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "fault": "[red]✗[/]"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `annie-quant doctor`.

    Attributes:
        log: A server's log, compared with the known errors.
        server: A running server: did it load --checkpoint, and which arithmetic does it run?
        checkpoint: The folder that --server serves.
        reference: The bf16 checkpoint that it was made from: recognises a server of that one.
        load_report: What vLLM wrote with ANNIE_QUANT_VLLM_REPORT=FILE: each tensor's use, each layer's kernel.
        measure: Measure the GPU's reachable bandwidth and launch cost, for predictions and quantize --device.
        output: With --measure: the device file. Default: where predictions look for it.
    """

    log: Path | None = None
    server: str | None = None
    checkpoint: Path | None = None
    reference: Path | None = None
    load_report: Path | None = None
    measure: bool = False
    output: Path | None = None
    key_env: KeyVariable = None
    as_json: AsJson = False


def doctor(options: DoctorOptions = DoctorOptions()) -> None:
    """Check what this machine lacks for which stage, with the fix. Exit code 3 on a fault.

    With --server: what a running server reports of itself, and the known faults of its version. With --checkpoint too: compare the
    log-probabilities that a server (vLLM, SGLang, llama.cpp) returns for about 20 prompts with the checkpoint's own under each
    numerics profile, and name the arithmetic that it runs, or "none of these"; compare the tensors and formats that it loaded, and
    count the drafts that it accepts.

    With --measure: how fast this machine's GPU reads weights, in a device file. A server on a
    processor is not predicted: `bench` measures it.
    """
    from annie_quant.ops import doctor as checks

    if options.measure:
        from annie_quant.checkpoint.decode_speed import measure_device

        with console.task("measure") as step:
            device = measure_device(options.output, step)
        emit(device) if options.as_json else console.line(f"{device.name}: {device.source}")
        return
    figures: dict[str, object] = {}
    with console.task("doctor") as step:
        if options.server is None:
            findings = checks.examine(options.log, progress=step)
        else:
            findings, figures = _check_server(options.server, options, step)
    if options.as_json:
        emit({"findings": findings, "fix_plan": checks.fix_plan(findings), **figures})
    else:
        print_findings(findings)
    sys.exit(3 if any(f.level == "fault" for f in findings) else 0)


def _check_server(
    url: str, options: DoctorOptions, progress: Progress
) -> tuple[list[CheckResult], dict[str, object]]:
    """Return the findings about a running server, and what --json prints of its arithmetic."""
    from annie_quant.bench.backend import key_headers

    headers = key_headers(options.key_env)
    quiet_engines()
    from annie_quant.ops.served_model import check_served, describe_server

    if options.checkpoint is None:
        return describe_server(url, headers), {}
    findings, result = check_served(
        url, options.checkpoint, options.reference, options.load_report, headers, progress
    )
    return findings, {"fingerprint": {"name": result.name, **asdict(result)}}


def print_findings(findings: Iterable[CheckResult]) -> None:
    for finding in findings:
        console.line(f"{finding.check}: {finding.message}", mark=_MARKS[finding.level])
        if finding.why:
            console.line(f"    {finding.why}")
        if finding.fix:
            console.line(f"    → {finding.fix}")


BACKEND_MARKS = {
    "right": "[green]✓[/]",
    "wrong": "[red]✗[/]",
    "failed": "[yellow]·[/]",
    "missing": "[dim]·[/]",
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Options of `annie-quant validate-gpu`.

    Attributes:
        stack: Also check the FP4 kernels of an installed serving stack: vllm, flashinfer, torch or all.
        container: Check the stack in a running container or an image.
        dry_run: With --container: print its command and start nothing.
    """

    stack: str | None = None
    container: str | None = None
    dry_run: bool = False
    as_json: AsJson = False


def validate_gpu(options: ValidateOptions = ValidateOptions()) -> None:
    """Check NVFP4 arithmetic on this GPU against a float64 oracle. Exit code 3 without a GPU."""
    container = options.container
    stack = options.stack
    if container is None and options.dry_run:
        raise UsageError("--dry-run needs --container")
    if container is None:
        validation = annie_quant.gemm.validate(stack=stack)
        emit(validation.to_dict()) if options.as_json else print_validation(validation)
        sys.exit(0 if validation.ok else 1)
    from annie_quant.gemm import stack_check

    if options.dry_run:
        echo(shlex.join(stack_check.plan_container(container, stack or "all")))
        return
    result = stack_check.examine_container(container, stack or "all")
    emit(result) if options.as_json else print_stack(result)
    sys.exit(1 if result.wrong else 0)


def print_validation(validation: Validation) -> None:
    """Print the GPU, one line per check, and the results of a serving stack if it was checked."""
    console.print_mapping("GPU", validation.device | validation.paths)
    for check in validation.checks:
        console.line(
            f"{check.name}  {check.detail}",
            mark=BACKEND_MARKS[{True: "right", False: "wrong", None: "missing"}[check.ok]],
        )
    if validation.stack is not None:
        print_stack(validation.stack)


def print_stack(result: StackResult) -> None:
    """Print one line per backend with cause and remedy of its fault, then the backend to choose."""
    for backend in result.backends:
        console.line(f"{backend.backend}: {_verdict(backend)}", mark=BACKEND_MARKS[backend.verdict])
        if backend.remedy:
            console.line(f"    {backend.cause}")
            console.line(f"    → {backend.remedy}")
    switch = f"   {result.switch}" if result.switch else ""
    console.line(
        f"choose {result.choose}{switch}" if result.choose else "no FP4 backend is right here"
    )
    if result.note:
        console.line(result.note)


def _verdict(backend: BackendResult) -> str:
    if backend.verdict in ("right", "wrong"):
        return f"{backend.verdict}, at most {backend.worst:.3g} of what rounding allows"
    reason = next((case.error for case in backend.cases if case.error), backend.cause)
    return f"{backend.verdict}: {reason}"


DISTRIBUTION = "annie-quant"
DEVELOPMENT_EXTRAS = ("dev", "docs", "perf")
_EXTRA = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([A-Za-z0-9._-]+)['"]""")


def show_version(verbose: bool, as_json: bool) -> None:
    if as_json:
        emit(inspect_installation())
        return
    lines = (
        version_lines(inspect_installation())
        if verbose
        else [f"annie-quant, version {__version__}"]
    )
    print("\n".join(lines))


def inspect_installation() -> JsonObject:
    """Return what is installed as --json prints it, and `fixes`: {what is missing: the command that installs it}.

    Nothing larger than the C modules is imported.
    """
    modules = {name: inspect_module(name) for name in native.BUILDS}
    extras = inspect_extras(declared_requirements())
    fixes = {name: module["fix"] for name, module in modules.items() if not module["loaded"]}
    fixes |= {
        f"extra {name}": f'pip install "{DISTRIBUTION}[{name}]"'
        for name, e in extras.items()
        if e["missing"]
    }
    threads = " free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    python = f"{platform.python_implementation()} {platform.python_version()}{threads} ({sys.executable})"
    machine = f"{platform.platform()}, {os.cpu_count()} processors"
    return {
        "version": __version__,
        "python": python,
        "platform": machine,
        "modules": modules,
        "extras": extras,
        "fixes": fixes,
    }


def inspect_module(name: str) -> JsonObject:
    """Return what a C module reports about itself; `why` and `fix` if it cannot be loaded."""
    try:
        module = native.load(name)
    except EnvironmentFault as fault:
        return {"loaded": False, "why": fault.message, "fix": fault.hint}
    file = Path(str(module.__file__))
    info: JsonObject = {"loaded": True, "file": str(file), "size_bytes": file.stat().st_size}
    if name == "_nvfp4":
        return info | {
            "variants": [*module.variants()],
            "variant": module.variant(),
            "threads": module.threads(),
        }
    if name == "_stream":
        # A wheel contains its libraries: auditwheel puts them in annie_quant.libs.
        return info | {
            "libcurl": module.CURL_VERSION,
            "bundled": (file.parent.parent / "annie_quant.libs").is_dir(),
        }
    return info | {"cuda_architectures": module.ARCHS.split(",")}


def declared_requirements() -> Iterable[str]:
    """Return the requirements of the installed package; none in a folder that was never installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def inspect_extras(requirements: Iterable[str]) -> dict[str, JsonObject]:
    """Return extra → `installed` (package → version) and `missing`, as in pyproject.toml, without those for development."""
    extras: dict[str, JsonObject] = {}
    for requirement in requirements:
        match = _EXTRA.match(requirement)
        if match is None or match[2] in DEVELOPMENT_EXTRAS:
            continue
        extra = extras.setdefault(match[2], {"installed": {}, "missing": []})
        try:
            extra["installed"][match[1]] = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            extra["missing"].append(match[1])
    return extras


def version_lines(info: JsonObject) -> list[str]:
    """Return one line per item, each followed by the command that installs it if it is missing."""
    without = {name: build.without for name, build in native.BUILDS.items()}
    rows = [
        line.split(": ", 1)
        for line in render_text("version.txt", info=info, without=without).splitlines()
    ]
    width = max(len(name) for name, _ in rows)
    out = [f"annie-quant {__version__}"]
    for name, text in rows:
        out.append(f"  {name:<{width}}  {text}")
        if name in info["fixes"]:
            out.append(f"  {'':<{width}}  > {info['fixes'][name]}")
    return out
