"""`annie-quant --version`: alone one line; with --verbose what of the package is here, what is missing and what brings it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from annie_quant import __version__, native
from annie_quant.cli.common import emit
from annie_quant.errors import EnvironmentFault

DISTRIBUTION = "annie-quant"
# Extras for those who work on annie-quant, not with it.
OF_THE_WORKSHOP = ("dev", "docs", "perf")
_EXTRA = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([A-Za-z0-9._-]+)['"]""")


def show(verbose: bool, as_json: bool) -> None:
    if as_json:
        emit(facts())
    else:
        click.echo("\n".join(lines(facts())) if verbose else f"annie-quant, version {__version__}")


def facts() -> dict[str, Any]:
    """What this installation has: {"version", "python", "platform", "modules", "extras", "mends"}; see `lines`.

    mends: {what is missing: the command that brings it}. Nothing heavier than the C modules is imported.
    """
    modules = {name: module_facts(name) for name in native.BUILDS}
    extras = extra_facts(wanted_by_metadata())
    mends = {name: seen["mend"] for name, seen in modules.items() if not seen["loaded"]}
    mends |= {
        f"extra {name}": f'pip install "{DISTRIBUTION}[{name}]"' for name, seen in extras.items() if seen["missing"]
    }
    return {
        "version": __version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        },
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "processors": os.cpu_count(),
        },
        "modules": modules,
        "extras": extras,
        "mends": mends,
    }


def module_facts(name: str) -> dict[str, Any]:
    """One C module: {"loaded", "file", "size_bytes", ...} and what it says of itself, or {"loaded": False, "why", "mend"}."""
    try:
        module = native.load(name)
    except EnvironmentFault as fault:
        return {"loaded": False, "why": fault.message, "mend": fault.hint}
    seen: dict[str, Any] = {"loaded": True, "file": module.__file__}
    seen["size_bytes"] = Path(str(module.__file__)).stat().st_size
    if name == "_nvfp4":
        seen |= {"variants": list(module.variants()), "variant": module.variant(), "threads": module.threads()}
    elif name == "_stream":
        seen |= {"libcurl": module.CURL_VERSION, "bundled": bundled(Path(str(module.__file__)))}
    else:
        seen |= {"cuda_architectures": module.ARCHS.split(",")}
    return seen


def bundled(module: Path) -> bool:
    """Whether the module lies in a wheel that carries its libraries (auditwheel puts them beside the package)."""
    return (module.parent.parent / "annie_quant.libs").is_dir()


def wanted_by_metadata() -> Iterable[str]:
    """The installed package's own list of what it wants; none in a folder that was never installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def extra_facts(requires: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{extra: {"installed": {distribution: version}, "missing": [distribution]}}, in the order of pyproject.toml."""
    extras: dict[str, dict[str, Any]] = {}
    for wanted in requires:
        matched = _EXTRA.match(wanted)
        if matched is None or matched[2] in OF_THE_WORKSHOP:
            continue
        seen = extras.setdefault(matched[2], {"installed": {}, "missing": []})
        try:
            seen["installed"][matched[1]] = importlib.metadata.version(matched[1])
        except importlib.metadata.PackageNotFoundError:
            seen["missing"].append(matched[1])
    return extras


def lines(seen: dict[str, Any]) -> list[str]:
    """`facts` for people: a line a thing, and under what is missing the command that brings it."""
    python, system = seen["python"], seen["platform"]
    told = {
        "python": f"{python['implementation']} {python['version']}{' free-threaded' if python['free_threaded'] else ''}"
        f" ({python['executable']})",
        "platform": f"{system['system']} {system['release']} {system['machine']}, {system['libc'] or 'unknown libc'}, "
        f"{system['processors']} processors",
    }
    told |= {name: module_line(name, module) for name, module in seen["modules"].items()}
    for extra, state in seen["extras"].items():
        have = ", ".join(f"{name} {version}" for name, version in state["installed"].items())
        lack = f"missing: {', '.join(state['missing'])}" if state["missing"] else ""
        told[f"extra {extra}"] = "; ".join(filter(None, (have, lack)))
    if not seen["extras"]:
        told["extras"] = "unknown: this folder was never installed (pip install -e .)"
    width = max(map(len, told))
    out = [f"annie-quant {seen['version']}"]
    for name, text in told.items():
        out.append(f"  {name:<{width}}  {text}")
        if name in seen["mends"]:
            out.append(f"  {'':<{width}}  > {seen['mends'][name]}")
    return out


def module_line(name: str, module: dict[str, Any]) -> str:
    if not module["loaded"]:
        return f"{module['why']}; {native.BUILDS[name].without}"
    size = f"{module['size_bytes'] / 1e6:.1f} MB"
    if name == "_nvfp4":
        return f"{module['variant']} (of {', '.join(module['variants'])}), {module['threads']} threads, {size}"
    if name == "_stream":
        return f"{module['libcurl']} ({'in the wheel' if module['bundled'] else 'of this system'}), {size}"
    return f"CUDA {', '.join(module['cuda_architectures'])}, {size}"
