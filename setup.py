"""Build the three C extension modules. All other settings of the package are in pyproject.toml.

    _nvfp4   always built; needs a C compiler and Python's headers
    _stream  built if libcurl's headers are installed (Debian: libcurl4-openssl-dev)
    _gemm    built if nvcc is installed (CUDA 13)

A module that cannot be built is skipped with a one-line message, and the rest is installed. pip shows the message with -v;
after installation `annie-quant --version --verbose` lists what is missing. NumPy is not needed for the build.

Environment variables:
    ANNIE_QUANT_ONLY=_nvfp4,_stream       build these modules only
    ANNIE_QUANT_WERROR=1                  treat warnings as errors
    ANNIE_QUANT_SANITIZE=address,undefined    build with sanitizers
    ANNIE_QUANT_ARCHS=90a,90-virtual      CUDA targets: machine code, and with -virtual PTX
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
# The target machine. A cross-compilation sets it with _PYTHON_HOST_PLATFORM.
MACHINE = sysconfig.get_platform().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
# PTX of compute_90 is for GPUs without machine code here, such as sm_100 and sm_110. Older PTX would have no clusters, which their
# plans use.
ARCHS = [a for a in os.environ.get("ANNIE_QUANT_ARCHS", "80,89,90a,120a,121a,90-virtual").split(",") if a]
WERROR = os.environ.get("ANNIE_QUANT_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
KINDS = os.environ.get("ANNIE_QUANT_SANITIZE", "")
SANITIZE = [f"-fsanitize={KINDS}", "-fno-sanitize-recover=all", "-g", "-fno-omit-frame-pointer"] if KINDS else []
C_FLAGS = ["-std=c11", "-O3", *WARNINGS, "-ffp-contract=off", "-fvisibility=hidden", "-fno-math-errno", *SANITIZE]
HOST_FLAGS = ",".join(["-fPIC", "-fvisibility=hidden", *WARNINGS])
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", HOST_FLAGS, "--threads", "2", f"-I{CSRC}"]
FIRST_LINE = re.compile(r"/\* flags for (\w+):(.*)\*/")


def note(line: str) -> None:
    print(f"annie-quant: {line}", file=sys.stderr)


def own_flags(source: str | Path) -> list[str] | None:
    """Return the compiler flags in a file's first line (SIMD variants have one), or None if the file is for another machine."""
    line = FIRST_LINE.match(Path(source).read_text())
    if line and not MACHINE.endswith(line[1]):
        return None
    return line[2].split() if line else []


def extension(folder: str, cflags: list[str], link_flags: list[str], **more) -> Extension:
    """Return the module _FOLDER of all .c and .cu files in csrc/FOLDER."""
    files = [f for part in ("common", folder) for f in sorted((CSRC / part).iterdir())]
    return Extension(
        f"annie_quant._{folder}",
        sources=[str(f) for f in files if f.suffix in (".c", ".cu") and own_flags(f) is not None],
        depends=[str(f) for f in files if f.suffix in (".h", ".cuh")],
        include_dirs=[str(CSRC)],
        extra_compile_args=C_FLAGS + cflags,
        extra_link_args=link_flags + SANITIZE,
        **more,
    )


def nvfp4() -> Extension:
    return extension("nvfp4", ["-fopenmp"], ["-fopenmp"], libraries=["m"])


def stream() -> Extension | None:
    query = next((c for c in (["pkg-config", "libcurl"], ["curl-config"]) if shutil.which(c[0])), None)
    try:
        if query is None:
            raise FileNotFoundError
        cflags, libs = (
            subprocess.run([*query, what], capture_output=True, text=True, check=True).stdout.split()
            for what in ("--cflags", "--libs")
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        note("_stream is skipped: libcurl's headers are missing. To install them: apt-get install libcurl4-openssl-dev")
        return None
    return extension("stream", cflags, libs)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def gemm() -> Extension | None:
    nvcc = find_nvcc()
    if nvcc is None:
        note("_gemm is skipped: nvcc (CUDA 13) is not on the PATH. All other modules work without it.")
        return None
    # The toolkit's folder as nvcc reports it: the nvcc on the PATH may be a wrapper script in another folder.
    dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"TOP=(.*)", dry_run)
    home = Path(top[1].strip()) if top else Path(nvcc).resolve().parent.parent
    return extension(
        "gemm",
        [],
        [],
        define_macros=[("ANNIE_QUANT_ARCHS", f'"{",".join(ARCHS)}"')],
        library_dirs=[str(home / d) for d in ("lib64", "lib") if (home / d / "libcudart_static.a").exists()],
        libraries=["cudart_static", "dl", "rt", "pthread", "stdc++"],
        # The rest is installed even if this nvcc does not support one of the targets.
        optional=not WERROR,
    )


def gencode(arch: str) -> str:
    """Return nvcc's -gencode of one target: machine code, or for "N-virtual" PTX, which later GPUs compile when they load it."""
    name = arch.removesuffix("-virtual")
    return f"-gencode=arch=compute_{name},code={'sm' if name == arch else 'compute'}_{name}"


def missing_prerequisite() -> str | None:
    """Return what is missing to compile C, a compiler or Python's headers, and the command that installs it; or None."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler is installed ({compiler}). To install one: apt-get install build-essential"
    folders = [sysconfig.get_path(kind) for kind in ("include", "platinclude")]
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        return f"Python's headers are missing ({folders[0]}/Python.h). To install them: apt-get install python3-dev"
    return None


class Build(build_ext):
    """build_ext with the flags of a file's first line, and nvcc for .cu files: `--parallel N` runs N at a time."""

    def build_extension(self, ext: Extension) -> None:
        rest = copy.copy(ext)
        rest.sources = [s for s in ext.sources if not s.endswith(".cu") and not own_flags(s)]
        rest.extra_objects = self.cuda_objects(ext)
        for source in ext.sources:
            if not source.endswith(".cu") and (flags := own_flags(source)):
                compile_args = {"macros": ext.define_macros, "include_dirs": ext.include_dirs}
                flags = [*ext.extra_compile_args, *flags]
                rest.extra_objects += self.compiler.compile(
                    [source], self.build_temp, extra_postargs=flags, **compile_args
                )
        rest.depends = [*ext.depends, *ext.sources, *rest.extra_objects, self.settings(ext)]
        super().build_extension(rest)

    def settings(self, ext: Extension) -> str:
        """Return a file that is as old as the settings of this build folder, so that other settings build a module again."""
        path = Path(self.build_temp) / f"{ext.name}.settings"
        chosen = repr((sysconfig.get_platform(), ext.define_macros, ext.extra_compile_args, ext.extra_link_args))
        if not path.exists() or path.read_text() != chosen:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(chosen)
        return str(path)

    def cuda_objects(self, ext: Extension) -> list[str]:
        """Compile the .cu files that are newer than their objects for these targets, and return all objects."""
        folder = Path(self.build_temp, "-".join(["cuda", *ARCHS]))
        newest_header = max(Path(f).stat().st_mtime for f in ext.depends)
        objects, commands = [], []
        for source in (s for s in ext.sources if s.endswith(".cu")):
            obj = folder / f"{source}.o"
            objects.append(str(obj))
            newest = max(newest_header, Path(source).stat().st_mtime)
            if self.force or not obj.exists() or obj.stat().st_mtime < newest:
                obj.parent.mkdir(parents=True, exist_ok=True)
                commands.append([find_nvcc(), *NVCC_FLAGS, *map(gencode, ARCHS), "-c", source, "-o", str(obj)])
        workers = 1 if self.parallel is None else os.cpu_count() if self.parallel is True else int(self.parallel)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self.spawn, commands))
        return objects


# Checked before setuptools copies files, so that the message is not lost in its output.
missing = missing_prerequisite() if {"build", "build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv) else None
if missing:
    sys.exit(f"annie-quant: {missing}. Or install a wheel: pip install --only-binary annie-quant annie-quant")
only = [n for n in os.environ.get("ANNIE_QUANT_ONLY", "").split(",") if n]
modules = [e for e in (nvfp4(), stream(), gemm()) if e is not None]
setup(
    ext_modules=[e for e in modules if not only or e.name.rsplit(".", 1)[1] in only],
    cmdclass={"build_ext": Build},
)
