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

import os
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
MACHINE = sysconfig.get_platform().lower()
X86 = MACHINE.endswith(("x86_64", "amd64"))
ARM = MACHINE.endswith(("aarch64", "arm64"))

# One file per SIMD variant, named after its instruction set; only that file is compiled with the flags.
VARIANT_FLAGS = {
    "_avx2.c": ["-mavx2", "-mf16c", "-mbmi2", "-mfma"],
    "_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mbmi2", "-mfma"],
    "_neon.c": [],
}
# PTX of compute_90 is for GPUs without machine code here, such as sm_100 and sm_110. Older PTX would have no clusters, which their
# plans use.
DEFAULT_ARCHS = "80,89,90a,120a,121a,90-virtual"
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "2", "-Icsrc"]


def note(line: str) -> None:
    print(f"annie-quant: {line}", file=sys.stderr)


def compile_flags() -> list[str]:
    flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fvisibility=hidden", "-fno-math-errno"]
    if os.environ.get("ANNIE_QUANT_WERROR") == "1":
        flags.append("-Werror")
    return flags + sanitizer_flags()


def sanitizer_flags() -> list[str]:
    kinds = os.environ.get("ANNIE_QUANT_SANITIZE", "")
    return [f"-fsanitize={kinds}", "-fno-sanitize-recover=all", "-g", "-fno-omit-frame-pointer"] if kinds else []


def c_sources(folder: str) -> list[str]:
    """Return the C files of one module, without the SIMD variants of other processors."""
    files = sorted((CSRC / "common").glob("*.c")) + sorted((CSRC / folder).glob("*.c"))
    skipped = () if X86 else ("_avx2.c", "_avx512.c")
    skipped += () if ARM else ("_neon.c",)
    return [str(f) for f in files if not f.name.endswith(skipped)]


def headers(folder: str) -> list[str]:
    return [str(h) for d in ("common", folder) for h in sorted((CSRC / d).glob("*.h*"))]


def extension(name: str, folder: str, **more) -> Extension:
    link = more.pop("extra_link_args", [])
    return Extension(
        f"annie_quant.{name}",
        sources=c_sources(folder),
        depends=headers(folder),
        include_dirs=[str(CSRC), *more.pop("include_dirs", [])],
        extra_compile_args=compile_flags() + more.pop("extra_compile_args", []),
        extra_link_args=link + sanitizer_flags(),
        **more,
    )


def nvfp4() -> Extension:
    return extension("_nvfp4", "nvfp4", extra_compile_args=["-fopenmp"], extra_link_args=["-fopenmp"], libraries=["m"])


def stream() -> Extension | None:
    query = next((c for c in (["pkg-config", "libcurl"], ["curl-config"]) if shutil.which(c[0])), None)
    try:
        if query is None:
            raise FileNotFoundError
        cflags = subprocess.run([*query, "--cflags"], capture_output=True, text=True, check=True).stdout.split()
        libs = subprocess.run([*query, "--libs"], capture_output=True, text=True, check=True).stdout.split()
    except (FileNotFoundError, subprocess.CalledProcessError):
        note("_stream is skipped: libcurl's headers are missing. To install them: apt-get install libcurl4-openssl-dev")
        return None
    return extension("_stream", "stream", extra_compile_args=cflags, extra_link_args=libs)


def gemm() -> Extension | None:
    if not list((CSRC / "gemm").glob("*.cu")):
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        note("_gemm is skipped: nvcc (CUDA 13) is not on the PATH. All other modules work without it.")
        return None
    home = cuda_home(nvcc)
    ext = extension(
        "_gemm",
        "gemm",
        include_dirs=[str(home / "include")],
        define_macros=[("ANNIE_QUANT_ARCHS", f'"{",".join(cuda_archs())}"')],
        library_dirs=[str(home / d) for d in ("lib64", "lib") if (home / d / "libcudart_static.a").exists()],
        libraries=["cudart_static", "dl", "rt", "pthread", "stdc++"],
        # The rest is installed even if this nvcc does not support one of the targets.
        optional=True,
    )
    ext.cuda_sources = [str(f) for f in sorted((CSRC / "gemm").glob("*.cu"))]
    ext.depends = [*ext.depends, *(str(f) for f in sorted((CSRC / "gemm").glob("*.cu*")))]
    ext.nvcc = nvcc
    return ext


def cuda_archs() -> list[str]:
    return [a for a in os.environ.get("ANNIE_QUANT_ARCHS", DEFAULT_ARCHS).split(",") if a]


def code_of(arch: str) -> str:
    """Return nvcc's -gencode of one target: machine code, or for "N-virtual" PTX, which later GPUs compile when they load it."""
    name = arch.removesuffix("-virtual")
    return f"arch=compute_{name},code={'sm' if name == arch else 'compute'}_{name}"


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def cuda_home(nvcc: str) -> Path:
    """Return the toolkit's folder as nvcc reports it: the nvcc on the PATH may be a wrapper script in another folder."""
    dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    top = next((line.split("TOP=", 1)[1].strip() for line in dry_run.splitlines() if "TOP=" in line), None)
    return Path(top).resolve() if top else Path(nvcc).resolve().parent.parent


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
    """build_ext with compiler flags per SIMD variant, and nvcc for .cu files: `--parallel N` runs N at a time."""

    def build_extension(self, ext: Extension) -> None:
        ext.depends = [*ext.depends, *ext.sources, self.settings(ext)]
        special = {s: f for s in ext.sources for tail, f in VARIANT_FLAGS.items() if s.endswith(tail)}
        ext.sources = [s for s in ext.sources if s not in special]
        for source, flags in special.items():
            ext.extra_objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=[*ext.extra_compile_args, *flags],
            )
        ext.extra_objects += self.cuda_objects(ext)
        ext.depends += ext.extra_objects
        super().build_extension(ext)

    def settings(self, ext: Extension) -> str:
        """Return a file that is as old as the settings of this build folder, so that other settings build a module again."""
        path = Path(self.build_temp) / f"{ext.name}.settings"
        chosen = repr((sysconfig.get_platform(), ext.define_macros, ext.extra_compile_args, ext.extra_link_args))
        if not path.exists() or path.read_text() != chosen:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(chosen)
        return str(path)

    def cuda_objects(self, ext: Extension) -> list[str]:
        folder = Path(self.build_temp) / "-".join(["cuda", *cuda_archs()])
        codes = [flag for arch in cuda_archs() for flag in ("-gencode", code_of(arch))]
        newest_header = max(Path(f).stat().st_mtime for f in ext.depends if f.endswith((".h", ".cuh")))
        objects, commands = [], []
        for source in getattr(ext, "cuda_sources", []):
            obj = folder / (source + ".o")
            objects.append(str(obj))
            newest = max(newest_header, Path(source).stat().st_mtime)
            if self.force or not obj.exists() or obj.stat().st_mtime < newest:
                obj.parent.mkdir(parents=True, exist_ok=True)
                commands.append([ext.nvcc, *NVCC_FLAGS, *codes, "-c", source, "-o", str(obj)])
        workers = 1 if self.parallel is None else os.cpu_count() if self.parallel is True else int(self.parallel)
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self.spawn, commands))
        return objects


# Checked before setuptools copies files, so that the message is not lost in its output.
missing = missing_prerequisite() if {"build", "build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv) else None
if missing:
    sys.exit(f"annie-quant: {missing}. Or install a wheel: pip install --only-binary annie-quant annie-quant")
only = [n for n in os.environ.get("ANNIE_QUANT_ONLY", "").split(",") if n]
modules = [e for e in (nvfp4(), stream(), gemm()) if e is not None and e.sources]
setup(
    ext_modules=[e for e in modules if not only or e.name.rsplit(".", 1)[1] in only],
    cmdclass={"build_ext": Build},
)
