"""`annie-quant --version`: one line; with --verbose the C modules and extras, and the commands that install the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from annie_quant import __version__, native
from annie_quant.cli.common import emit
from annie_quant.errors import EnvironmentFault

DISTRIBUTION = "annie-quant"
DEVELOPMENT_EXTRAS = ("dev", "docs", "perf")
_EXTRA = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([A-Za-z0-9._-]+)['"]""")


@dataclass(frozen=True)
class ModuleInfo:
    """One C module. details: what the module reports about itself; error and fix: if it could not be loaded."""

    loaded: bool
    file: str = ""
    size_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        if not self.loaded:
            return {"loaded": False, "why": self.error, "fix": self.fix}
        return {"loaded": True, "file": self.file, "size_bytes": self.size_bytes, **self.details}


@dataclass(frozen=True)
class ExtraInfo:
    """One extra. installed: {distribution: version}."""

    installed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Installation:
    """What is installed. fixes: {what is missing: the command that installs it}."""

    python: dict[str, Any]
    platform: dict[str, Any]
    modules: dict[str, ModuleInfo]
    extras: dict[str, ExtraInfo]

    @property
    def fixes(self) -> dict[str, str]:
        missing = {name: module.fix for name, module in self.modules.items() if not module.loaded}
        return missing | {
            f"extra {name}": f'pip install "{DISTRIBUTION}[{name}]"' for name, e in self.extras.items() if e.missing
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "python": self.python,
            "platform": self.platform,
            "modules": {name: module.to_dict() for name, module in self.modules.items()},
            "extras": {name: asdict(extra) for name, extra in self.extras.items()},
            "fixes": self.fixes,
        }


def show(verbose: bool, as_json: bool) -> None:
    if as_json:
        emit(inspect().to_dict())
    else:
        click.echo("\n".join(lines(inspect())) if verbose else f"annie-quant, version {__version__}")


def inspect() -> Installation:
    """Inspect this installation. Nothing larger than the C modules is imported."""
    return Installation(
        python={
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        },
        platform={
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "processors": os.cpu_count(),
        },
        modules={name: inspect_module(name) for name in native.BUILDS},
        extras=inspect_extras(declared_requirements()),
    )


def inspect_module(name: str) -> ModuleInfo:
    try:
        module = native.load(name)
    except EnvironmentFault as fault:
        return ModuleInfo(False, error=fault.message, fix=fault.hint)
    file = Path(str(module.__file__))
    details: dict[str, Any]
    if name == "_nvfp4":
        details = {"variants": list(module.variants()), "variant": module.variant(), "threads": module.threads()}
    elif name == "_stream":
        details = {"libcurl": module.CURL_VERSION, "bundled": is_bundled(file)}
    else:
        details = {"cuda_architectures": module.ARCHS.split(",")}
    return ModuleInfo(True, str(file), file.stat().st_size, details)


def is_bundled(module: Path) -> bool:
    """Whether the module is from a wheel that contains its libraries (auditwheel puts them in annie_quant.libs)."""
    return (module.parent.parent / "annie_quant.libs").is_dir()


def declared_requirements() -> Iterable[str]:
    """Return the requirements of the installed package; none in a folder that was never installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def inspect_extras(requirements: Iterable[str]) -> dict[str, ExtraInfo]:
    """Return the extras in the order of pyproject.toml, without those for development."""
    extras: dict[str, ExtraInfo] = {}
    for requirement in requirements:
        match = _EXTRA.match(requirement)
        if match is None or match[2] in DEVELOPMENT_EXTRAS:
            continue
        extra = extras.setdefault(match[2], ExtraInfo())
        try:
            extra.installed[match[1]] = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            extra.missing.append(match[1])
    return extras


def lines(installation: Installation) -> list[str]:
    """Return one line per item, each followed by the command that installs it if it is missing."""
    python, system = installation.python, installation.platform
    rows = {
        "python": f"{python['implementation']} {python['version']}{' free-threaded' if python['free_threaded'] else ''}"
        f" ({python['executable']})",
        "platform": f"{system['system']} {system['release']} {system['machine']}, {system['libc'] or 'unknown libc'}, "
        f"{system['processors']} processors",
    }
    rows |= {name: module_line(name, module) for name, module in installation.modules.items()}
    for name, extra in installation.extras.items():
        installed = ", ".join(f"{package} {version}" for package, version in extra.installed.items())
        missing = f"missing: {', '.join(extra.missing)}" if extra.missing else ""
        rows[f"extra {name}"] = "; ".join(filter(None, (installed, missing)))
    if not installation.extras:
        rows["extras"] = "unknown: this folder was never installed (pip install -e .)"
    width, fixes = max(map(len, rows)), installation.fixes
    out = [f"annie-quant {__version__}"]
    for name, text in rows.items():
        out.append(f"  {name:<{width}}  {text}")
        if name in fixes:
            out.append(f"  {'':<{width}}  > {fixes[name]}")
    return out


def module_line(name: str, module: ModuleInfo) -> str:
    if not module.loaded:
        return f"{module.error}; {native.BUILDS[name].without}"
    size, details = f"{module.size_bytes / 1e6:.1f} MB", module.details
    if name == "_nvfp4":
        return f"{details['variant']} (of {', '.join(details['variants'])}), {details['threads']} threads, {size}"
    if name == "_stream":
        return f"{details['libcurl']} ({'in the wheel' if details['bundled'] else 'of this system'}), {size}"
    return f"CUDA {', '.join(details['cuda_architectures'])}, {size}"
