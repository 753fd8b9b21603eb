"""Build the three C extension modules. All other settings of the package are in pyproject.toml.

    _nvfp4   always built; needs a C compiler and Python's headers
    _stream  built if libcurl's headers are installed (Debian: libcurl4-openssl-dev)
    _gemm    built if nvcc is installed (CUDA 13)

A module that cannot be built is skipped with a one-line message, and the rest is installed. pip shows the message with -v;
after installation `annie-quant --version --verbose` lists what is missing. NumPy is not needed for the build.

Environment variables:
    ANNIE_QUANT_ONLY=_nvfp4,_stream       build these modules only
    ANNIE_QUANT_WERROR=1                  treat warnings as errors
    ANNIE_QUANT_ARCHS=90a,90-virtual      CUDA targets: machine code, and with -virtual PTX
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
# The target machine. A cross-compilation sets it with _PYTHON_HOST_PLATFORM.
MACHINE = sysconfig.get_platform().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
# sm_90a is tested on an H200; sm_121a, a GB10, is compiled and inspected, and was not run yet. PTX of compute_90 is for all other
# GPUs from compute capability 9.0 on, none of which was tested.
ARCHS = [a for a in os.environ.get("ANNIE_QUANT_ARCHS", "90a,121a,90-virtual").split(",") if a]
WERROR = os.environ.get("ANNIE_QUANT_WERROR") == "1"
WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
C_FLAGS = [
    "-std=c11",
    "-O3",
    *WARNINGS,
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-math-errno",
]
NVCC = shutil.which(
    "nvcc", path=os.environ["CUDA_HOME"] + "/bin" if "CUDA_HOME" in os.environ else None
)
HOST_FLAGS = ",".join(["-fPIC", "-fvisibility=hidden", *WARNINGS])
# -gencode: machine code, or for "N-virtual" PTX, which later GPUs compile when they load it.
CODES = [(a.removesuffix("-virtual"), "compute" if a.endswith("-virtual") else "sm") for a in ARCHS]
TARGETS = [f"-gencode=arch=compute_{number},code={kind}_{number}" for number, kind in CODES]
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-Xcompiler",
    HOST_FLAGS,
    "--threads",
    "2",
    f"-I{CSRC}",
    *TARGETS,
]
FIRST_LINE = re.compile(r"/\* flags for (\w+):(.*)\*/")


def own_flags(source: str | Path) -> list[str] | None:
    """Return the compiler flags in a file's first line (SIMD variants have one), or None if the file is for another machine."""
    line = FIRST_LINE.match(Path(source).read_text())
    if line and not MACHINE.endswith(line[1]):
        return None
    return line[2].split() if line else []


def extension(
    folder: str, cflags: Sequence[str] = (), link_flags: Sequence[str] = (), **more
) -> Extension:
    """Return the module _FOLDER of all .c and .cu files in csrc/FOLDER."""
    files = [f for part in ("common", folder) for f in sorted((CSRC / part).iterdir())]
    return Extension(
        f"annie_quant._{folder}",
        sources=[str(f) for f in files if f.suffix in (".c", ".cu") and own_flags(f) is not None],
        depends=[str(f) for f in files if f.suffix in (".h", ".cuh")],
        include_dirs=[str(CSRC)],
        extra_compile_args=[*C_FLAGS, *cflags],
        extra_link_args=list(link_flags),
        **more,
    )


def stream() -> Extension | None:
    query = next(
        (c for c in (["pkg-config", "libcurl"], ["curl-config"]) if shutil.which(c[0])), ["false"]
    )
    answers = [
        subprocess.run([*query, what], capture_output=True, text=True)
        for what in ("--cflags", "--libs")
    ]
    if any(answer.returncode for answer in answers):
        print(
            "annie-quant: _stream is skipped: libcurl's headers are missing."
            " To install them: apt-get install libcurl4-openssl-dev",
            file=sys.stderr,
        )
        return None
    return extension("stream", *(answer.stdout.split() for answer in answers))


def gemm() -> Extension | None:
    if NVCC is None:
        print(
            "annie-quant: _gemm is skipped: nvcc (CUDA 13) is not on the PATH. All other modules work without it.",
            file=sys.stderr,
        )
        return None
    # The toolkit's folder as nvcc reports it: the nvcc on the PATH may be a wrapper script in another folder.
    dry_run = subprocess.run(
        [NVCC, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"TOP=(.*)", dry_run)
    home = Path(top[1].strip() if top else Path(NVCC).resolve().parent.parent)
    return extension(
        "gemm",
        define_macros=[("ANNIE_QUANT_ARCHS", f'"{",".join(ARCHS)}"')],
        library_dirs=[
            str(home / d) for d in ("lib64", "lib") if (home / d / "libcudart_static.a").exists()
        ],
        libraries=["cudart_static", "dl", "rt", "pthread", "stdc++"],
        # The rest is installed even if this nvcc does not support one of the targets.
        optional=not WERROR,
    )


def missing_prerequisite() -> str | None:
    """Return what is missing to compile C, a compiler or Python's headers, and the command that installs it; or None."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler is installed ({compiler}). To install one: apt-get install build-essential"
    folders = [sysconfig.get_path(kind) for kind in ("include", "platinclude")]
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        return f"Python's headers are missing ({folders[0]}/Python.h). To install them: apt-get install python3-dev"
    return None


def compiler_version() -> str:
    """Return what the C compiler says about itself, "" if it says nothing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


class Build(build_ext):
    """build_ext with the flags of a file's first line, and nvcc for .cu files. All processors compile, or `--parallel N`."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip has no option for it, and one processor needs minutes for the .cu files.
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        rest = copy.copy(ext)
        rest.sources = [s for s in ext.sources if s.endswith(".c") and not own_flags(s)]
        rest.extra_objects = self.cuda_objects(ext)
        for source in sorted({s for s in ext.sources if s.endswith(".c")} - set(rest.sources)):
            rest.extra_objects += self.compiler.compile(
                [source],
                self.build_temp,
                ext.define_macros,
                ext.include_dirs,
                extra_postargs=[*ext.extra_compile_args, *own_flags(source)],
            )
        # As old as the settings of this build folder, so that other settings build a module again.
        settings = Path(self.build_temp, f"{ext.name}.settings")
        chosen = repr(
            (
                MACHINE,
                *(os.environ.get(name) for name in ("CC", "CFLAGS")),
                compiler_version(),
                ext.define_macros,
                ext.extra_compile_args,
                ext.extra_link_args,
            )
        )
        if not settings.exists() or settings.read_text() != chosen:
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text(chosen)
        rest.depends = [*ext.depends, *ext.sources, *rest.extra_objects, str(settings)]
        super().build_extension(rest)

    def cuda_objects(self, ext: Extension) -> list[str]:
        """Compile the .cu files that are newer than their objects, and return all objects.

        Each nvcc, with its flags, has a folder of its own.
        """
        sources = [source for source in ext.sources if source.endswith(".cu")]
        if not sources:
            return []
        version = subprocess.run([NVCC, "--version"], capture_output=True, text=True).stdout
        flags = [os.environ.get(f"NVCC_{kind}_FLAGS", "") for kind in ("PREPEND", "APPEND")]
        compiler = repr((NVCC, version, NVCC_FLAGS, flags)).encode()
        folder = Path(self.build_temp, f"cuda-{hashlib.sha256(compiler).hexdigest()[:16]}")
        newest_header = max(Path(f).stat().st_mtime for f in ext.depends)
        objects = []
        commands = []
        for source in sources:
            obj = folder / f"{source}.o"
            objects.append(str(obj))
            if (
                self.force
                or not obj.exists()
                or obj.stat().st_mtime < max(newest_header, Path(source).stat().st_mtime)
            ):
                obj.parent.mkdir(parents=True, exist_ok=True)
                commands.append([NVCC, *NVCC_FLAGS, "-c", source, "-o", str(obj)])
        with ThreadPoolExecutor(
            os.cpu_count() if self.parallel is True else int(self.parallel)
        ) as pool:
            list(pool.map(self.spawn, commands))
        return objects


# Checked before setuptools copies files, so that the message is not lost in its output.
missing = (
    missing_prerequisite()
    if {"build", "build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv)
    else None
)
if missing:
    sys.exit(
        f"annie-quant: {missing}. Or install a wheel: pip install --only-binary annie-quant annie-quant"
    )
only = [n for n in os.environ.get("ANNIE_QUANT_ONLY", "").split(",") if n]
nvfp4 = extension("nvfp4", ["-pthread"], ["-pthread"], libraries=["m"])
modules = [e for e in (nvfp4, stream(), gemm()) if e is not None]
setup(
    ext_modules=[e for e in modules if not only or e.name.rsplit(".", 1)[1] in only],
    cmdclass={"build_ext": Build},
)
