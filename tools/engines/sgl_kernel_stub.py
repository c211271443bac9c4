"""Stub of sgl_kernel, which exists for CUDA only: every name exists, and every call fails.

SGLang imports sgl_kernel at start. Its torch_native and pytorch backends on CPU never call it for the models of the
tests.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Name:
    def __init__(self, name):
        self.__dict__["_name"] = name
        self.__dict__["__name__"] = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"sgl_kernel is not installed: {self._name} was called")

    def __hash__(self):
        return hash(self._name)

    def __eq__(self, other):
        return isinstance(other, _Name) and other._name == self._name

    def __or__(self, other):
        return object

    __ror__ = __or__


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


_module = _Module(__name__)
_module.__dict__.update({k: v for k, v in globals().items() if k != "_module"})
sys.modules[__name__] = _module
sys.meta_path.insert(0, _Finder())
