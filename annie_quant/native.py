"""The three C modules: load one, or say what its build wants and which command brings it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from annie_quant.errors import EnvironmentFault

# A wheel holds what its builder had; only a build here finds what is here.
FROM_SOURCE = "pip install --force-reinstall --no-deps --no-binary annie-quant annie-quant"


@dataclass(frozen=True)
class Build:
    """wants: what setup.py must find. without: what does not work where it is missing. mend: the commands."""

    wants: str
    without: str
    mend: str


BUILDS = {
    "_nvfp4": Build(
        "a C compiler and Python's headers",
        "nothing works without the codec",
        f"apt-get install build-essential python3-dev && {FROM_SOURCE}",
    ),
    "_stream": Build(
        "libcurl's headers",
        "no timing without it",
        f"apt-get install build-essential python3-dev pkg-config libcurl4-openssl-dev && {FROM_SOURCE}",
    ),
    "_gemm": Build(
        "nvcc (CUDA 13) on the PATH",
        "no GPU kernels, all else works",
        f"install CUDA 13's toolkit (nvcc on the PATH), then: {FROM_SOURCE}",
    ),
}


def load(name: str) -> ModuleType:
    """annie_quant's C module of this name. Raises EnvironmentFault where it is not built, or built and does not load."""
    try:
        return importlib.import_module(f"annie_quant.{name}")
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"annie_quant.{name} is not built here: that wants {BUILDS[name].wants}", BUILDS[name].mend
        ) from error
    except ImportError as error:
        raise EnvironmentFault(f"annie_quant.{name} does not load: {error}", BUILDS[name].mend) from error
