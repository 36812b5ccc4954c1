"""A stub of torch_npu, for machines without an NPU: vllm-ascend can be imported with it, and runs on the CPU.

Torch loads it as it loads the real one, by the entry point beside it. Whatever is asked of `torch.npu`, of
this module or of Ascend's other libraries is there and does nothing. `npu_top_k_top_p` alone, which samplers
call, does its work.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed

LIBRARIES = ("acl", "npugraph_ex")


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Ascend's libraries that are not there, and makes each of mocks."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top, _, rest = fullname.partition(".")
        if top in LIBRARIES or (top == __name__ and rest):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_rest, name)


def npu_top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """By sorting, as the kernel's page describes it: the k largest, then as many as have p together.

    Unlike vLLM's function, it drops of equal logits at the edge those with the higher token ids.
    """
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if k is not None:
        keep &= torch.arange(ordered.shape[-1]) < k.unsqueeze(-1)
    if p is not None:
        probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        keep &= probs.cumsum(dim=-1) - probs < p.unsqueeze(-1)
    return logits.masked_fill(~keep.gather(-1, order.argsort(dim=-1)), -torch.inf)


def _unpinned(function: Any) -> Any:
    """A function of torch that makes tensors, without memory that is pinned: that takes a device."""

    @functools.wraps(function)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs)

    return make


def _autoload() -> None:
    """What torch calls when it is imported."""


__path__: list[str] = []
__version__ = "2.10.0"
_rest = MagicMock(name=__name__)
sys.meta_path.insert(0, _Nothing())
torch.utils.rename_privateuse1_backend("npu")  # torch.device("npu")
torch.npu = MagicMock(name="torch.npu")  # type: ignore[attr-defined]
torch.npu.is_available = lambda: True
torch.npu.device_count = lambda: 1
torch.npu.get_device_capability = lambda *_: None  # as the real one, which verl knows
for _name in ("tensor", "zeros", "ones", "full", "empty", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment, method-assign]
torch.distributed.is_hccl_available = lambda: False  # type: ignore[attr-defined]
# vllm-ascend patches these and loads them again.
for _name in ("npugraph_ex.npu_fx_compiler", "npugraph_ex.core._concrete_graph"):
    importlib.import_module(_name)
_reload = importlib.reload
importlib.reload = lambda module: module if isinstance(module, MagicMock) else _reload(module)
