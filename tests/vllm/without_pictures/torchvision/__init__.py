"""Stands in for torchvision, whose builds do not fit a torch without CUDA. vLLM's classes for models with towers import
it, but no image of a request goes through it: whatever is asked of it is an empty class, but for the functions by which
vLLM learns how many tokens an image of its own has."""

import importlib.abc
import importlib.machinery
import sys
import types

_MODES = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


def _pil_to_tensor(image):
    import numpy
    import torch

    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def _resize(image, size, interpolation=None, antialias=None):
    return image.new_zeros(*image.shape[:-2], *size)


def _normalize(image, mean, std, inplace=False):
    return image.float()


_FUNCTIONS = {"pil_to_tensor": _pil_to_tensor, "resize": _resize, "normalize": _normalize}


class _Anything(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        modes = {mode: number for number, mode in enumerate(_MODES)}
        if name != "functional":
            return type(name, (), modes)
        functions = {known: staticmethod(function) for known, function in _FUNCTIONS.items()}
        return type(name, (), {"InterpolationMode": type("InterpolationMode", (), modes), **functions})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
