"""A stand-in for torchvision, which has no CPU build on the package registry: every name imports, nothing works.

vLLM imports it for models that see; a text model never calls it. tests/integration/vllm_cpu.py puts this file into the
environment that it makes for vLLM, as torchvision/__init__.py, and nowhere else.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"
__path__ = []


class _Name(type):
    """A class whose attributes are their own names (enumerations are read while transformers is imported)."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Name(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__getattr__ = _Module("torchvision").__getattr__
