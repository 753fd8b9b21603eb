"""A replacement of torchvision, which has no CPU build on the package registry: every name can be imported, nothing works.

vLLM imports it for multimodal models; a text model never calls it. tests/integration/vllm_cpu.py copies this file to
torchvision/__init__.py in the environment that it makes for vLLM, and nowhere else.
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
        built = _Name(name, (), {})
        setattr(self, name, built)
        return built


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith("torchvision.")
            else None
        )

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__getattr__ = _Module("torchvision").__getattr__
