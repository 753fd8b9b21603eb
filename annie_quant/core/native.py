"""The three C modules: load one, or report what its build needs and which command installs it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from annie_quant.core.errors import EnvironmentFault

# A wheel has only the modules that its builder could build; a build on this machine finds what is
# installed here.
FROM_SOURCE = (
    "pip install --force-reinstall --no-deps SOURCE (a clone, or an unpacked source distribution)"
)


@dataclass(frozen=True)
class Build:
    """How a C module is built.

    needs: what setup.py must find on the machine.
    without: what does not work when the module is missing.
    fix: the commands that install it.
    """

    needs: str
    without: str
    fix: str


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
    """Return annie_quant's C module `name`.

    Raises EnvironmentFault if it is not built or cannot be loaded.
    """
    try:
        return importlib.import_module(f"annie_quant.{name}")
    except ModuleNotFoundError as error:
        message = f"annie_quant.{name} is not built here: it needs {BUILDS[name].needs}"
        raise EnvironmentFault(message, BUILDS[name].fix) from error
    except ImportError as error:
        raise EnvironmentFault(
            f"annie_quant.{name} does not load: {error}", BUILDS[name].fix
        ) from error
