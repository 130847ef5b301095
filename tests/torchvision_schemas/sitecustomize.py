"""Lets the torchvision of PyPI, whose compiled part does not fit a CPU torch, be imported.

Its Python part refers to two operators of the compiled one. They are never called here; declaring
them, in every process that has this folder on PYTHONPATH, is enough.
"""

import importlib.abc
import sys

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
kept = []


class _DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define(f"nms{_BOXES}")
            library.define(f"qnms{_BOXES}")
            kept.append(library)


sys.meta_path.insert(0, _DeclareFirst())
