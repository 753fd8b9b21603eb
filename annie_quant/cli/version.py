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

import click
import msgspec
from msgspec import field

from annie_quant import __version__, native
from annie_quant.cli.common import emit
from annie_quant.errors import EnvironmentFault

DISTRIBUTION = "annie-quant"
DEVELOPMENT_EXTRAS = ("dev", "docs", "perf")
_EXTRA = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"]([A-Za-z0-9._-]+)['"]""")


class ModuleInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One C module: what it reports about itself, or error and fix if it could not be loaded."""

    loaded: bool
    file: str = ""
    size_bytes: int = 0
    variants: list[str] | None = None
    variant: str | None = None
    threads: int | None = None
    libcurl: str | None = None
    bundled: bool | None = None
    cuda_architectures: list[str] | None = None
    error: str = field(default="", name="why")
    fix: str = ""


class ExtraInfo(msgspec.Struct):
    """One extra. installed: {distribution: version}."""

    installed: dict[str, str] = {}
    missing: list[str] = []


class PythonInfo(msgspec.Struct, kw_only=True):
    version: str
    implementation: str
    executable: str
    free_threaded: bool


class PlatformInfo(msgspec.Struct, kw_only=True):
    system: str
    release: str
    machine: str
    libc: str
    processors: int | None


class Installation(msgspec.Struct, kw_only=True):
    """What is installed. fixes: {what is missing: the command that installs it}."""

    version: str = __version__
    python: PythonInfo
    platform: PlatformInfo
    modules: dict[str, ModuleInfo]
    extras: dict[str, ExtraInfo]
    fixes: dict[str, str] = {}

    def __post_init__(self) -> None:
        self.fixes = {name: module.fix for name, module in self.modules.items() if not module.loaded}
        missing = (name for name, extra in self.extras.items() if extra.missing)
        self.fixes |= {f"extra {name}": f'pip install "{DISTRIBUTION}[{name}]"' for name in missing}


def show(verbose: bool, as_json: bool) -> None:
    if as_json:
        emit(inspect())
    else:
        click.echo("\n".join(lines(inspect())) if verbose else f"annie-quant, version {__version__}")


def inspect() -> Installation:
    """Inspect this installation. Nothing larger than the C modules is imported."""
    return Installation(
        python=PythonInfo(
            version=platform.python_version(),
            implementation=platform.python_implementation(),
            executable=sys.executable,
            free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        ),
        platform=PlatformInfo(
            system=platform.system(),
            release=platform.release(),
            machine=platform.machine(),
            libc=" ".join(platform.libc_ver()).strip(),
            processors=os.cpu_count(),
        ),
        modules={name: inspect_module(name) for name in native.BUILDS},
        extras=inspect_extras(declared_requirements()),
    )


def inspect_module(name: str) -> ModuleInfo:
    try:
        module = native.load(name)
    except EnvironmentFault as fault:
        return ModuleInfo(loaded=False, error=fault.message, fix=fault.hint)
    file = Path(str(module.__file__))
    info = ModuleInfo(loaded=True, file=str(file), size_bytes=file.stat().st_size)
    if name == "_nvfp4":
        info.variants, info.variant, info.threads = list(module.variants()), module.variant(), module.threads()
    elif name == "_stream":
        info.libcurl, info.bundled = module.CURL_VERSION, is_bundled(file)
    else:
        info.cuda_architectures = module.ARCHS.split(",")
    return info


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
        "python": f"{python.implementation} {python.version}{' free-threaded' if python.free_threaded else ''}"
        f" ({python.executable})",
        "platform": f"{system.system} {system.release} {system.machine}, {system.libc or 'unknown libc'}, "
        f"{system.processors} processors",
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
    size = f"{module.size_bytes / 1e6:.1f} MB"
    if name == "_nvfp4":
        threads = f"{module.threads} thread{'' if module.threads == 1 else 's'}"
        return f"{module.variant} (of {', '.join(module.variants or ())}), {threads}, {size}"
    if name == "_stream":
        return f"{module.libcurl} ({'in the wheel' if module.bundled else 'of this system'}), {size}"
    return f"CUDA {', '.join(module.cuda_architectures or ())}, {size}"
