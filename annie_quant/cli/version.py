"""`annie-quant --version`: one line; with --verbose the C modules and extras, and the commands that install the rest."""

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
DEVELOPMENT_EXTRAS = ("dev", "docs", "perf")
_EXTRA = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([A-Za-z0-9._-]+)['"]""")


def show(verbose: bool, as_json: bool) -> None:
    if as_json:
        emit(inspect())
    else:
        click.echo("\n".join(lines(inspect())) if verbose else f"annie-quant, version {__version__}")


def inspect() -> dict[str, Any]:
    """Return what is installed as --json prints it, and `fixes`: {what is missing: the command that installs it}.

    Nothing larger than the C modules is imported.
    """
    modules = {name: inspect_module(name) for name in native.BUILDS}
    extras = inspect_extras(declared_requirements())
    fixes = {name: module["fix"] for name, module in modules.items() if not module["loaded"]}
    fixes |= {f"extra {name}": f'pip install "{DISTRIBUTION}[{name}]"' for name, e in extras.items() if e["missing"]}
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
        "fixes": fixes,
    }


def inspect_module(name: str) -> dict[str, Any]:
    """Return what a C module reports about itself; `why` and `fix` if it cannot be loaded."""
    try:
        module = native.load(name)
    except EnvironmentFault as fault:
        return {"loaded": False, "why": fault.message, "fix": fault.hint}
    file = Path(str(module.__file__))
    info: dict[str, Any] = {"loaded": True, "file": str(file), "size_bytes": file.stat().st_size}
    if name == "_nvfp4":
        return info | {"variants": [*module.variants()], "variant": module.variant(), "threads": module.threads()}
    if name == "_stream":
        # A wheel contains its libraries: auditwheel puts them in annie_quant.libs.
        return info | {"libcurl": module.CURL_VERSION, "bundled": (file.parent.parent / "annie_quant.libs").is_dir()}
    return info | {"cuda_architectures": module.ARCHS.split(",")}


def declared_requirements() -> Iterable[str]:
    """Return the requirements of the installed package; none in a folder that was never installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def inspect_extras(requirements: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return extra → `installed` (package → version) and `missing`, as in pyproject.toml, without those for development."""
    extras: dict[str, dict[str, Any]] = {}
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


def lines(info: dict[str, Any]) -> list[str]:
    """Return one line per item, each followed by the command that installs it if it is missing."""
    python, system = info["python"], info["platform"]
    threads = " free-threaded" if python["free_threaded"] else ""
    rows = {
        "python": f"{python['implementation']} {python['version']}{threads} ({python['executable']})",
        "platform": f"{system['system']} {system['release']} {system['machine']}, {system['libc'] or 'unknown libc'}, "
        f"{system['processors']} processors",
    }
    rows |= {name: module_line(name, module) for name, module in info["modules"].items()}
    for name, extra in info["extras"].items():
        installed = ", ".join(f"{package} {version}" for package, version in extra["installed"].items())
        missing = f"missing: {', '.join(extra['missing'])}" if extra["missing"] else ""
        rows[f"extra {name}"] = "; ".join(filter(None, (installed, missing)))
    if not info["extras"]:
        rows["extras"] = "unknown: this folder was never installed (pip install -e .)"
    width = max(map(len, rows))
    out = [f"annie-quant {__version__}"]
    for name, text in rows.items():
        out.append(f"  {name:<{width}}  {text}")
        if name in info["fixes"]:
            out.append(f"  {'':<{width}}  > {info['fixes'][name]}")
    return out


def module_line(name: str, module: dict[str, Any]) -> str:
    if not module["loaded"]:
        return f"{module['why']}; {native.BUILDS[name].without}"
    size = f"{module['size_bytes'] / 1e6:.1f} MB"
    if name == "_nvfp4":
        return f"{module['variant']} (of {', '.join(module['variants'])}), threads: {module['threads']}, {size}"
    if name == "_stream":
        return f"{module['libcurl']} ({'in the wheel' if module['bundled'] else 'of this system'}), {size}"
    return f"CUDA {', '.join(module['cuda_architectures'])}, {size}"
