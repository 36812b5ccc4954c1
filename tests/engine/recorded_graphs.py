"""CUDA graphs on a CPU: a capture notes what runs in it, and a replay runs that again.

Noted is what a GPU would see: each operation of torch's, with the very tensors and numbers that it had, and
each launch of an interpreted Triton kernel. Python does not run again. So whatever it had decided or made in
the capture stays as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from tests.accelerator import INDEXING, place

aten = torch.ops.aten
# In inference mode what is made of other operations comes whole: `item`, not `_local_scalar_dense`.
_WAITS = {
    aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.argwhere.default,
    aten.where.default, aten.equal.default, aten.allclose.default, aten.is_nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten.lift_fresh.default,
}  # fmt: skip
waits: Counter[str] = Counter()  # in captures, where CUDA allows none; by operation and place


class Graph:
    """In place of `torch.cuda.CUDAGraph`.

    Attributes:
        steps: what a replay runs.
        made: the tensors that were made in the capture. A replay spoils them first, so that it shows if one
            is read that the replay has not written.
    """

    def __init__(self, *_, **__):
        self.steps: list[Callable[[], Any]] = []
        self.made: list[torch.Tensor] = []

    def replay(self):
        assert Capture.running is None, "a replay in a capture"
        with torch.inference_mode():
            for tensor in self.made:
                _spoil(tensor)
            for step in self.steps:
                step()

    def reset(self):
        self.steps, self.made = [], []

    def pool(self):
        """All graphs share the memory of the process."""


class Capture(TorchDispatchMode):
    """In place of `torch.cuda.graph`: a context that notes in a graph what runs in it."""

    running: Capture | None = None

    def __init__(self, graph, *_, **__):
        super().__init__()
        self._graph, self._is_noting = graph, True

    def __enter__(self):
        assert Capture.running is None, "a capture in a capture"
        Capture.running = self
        return super().__enter__()

    def __exit__(self, *error):
        Capture.running = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._is_noting:
            self._note(func, args, kwargs, found)
        return found

    def _note(self, func, args, kwargs, found):
        by_mask = func in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func in _WAITS or by_mask:
            waits[f"{func} in {place()}"] += 1
        given = {_memory(x) for x in _tensors((args, kwargs))}
        outputs = _tensors(found)
        new = [x for x in outputs if _memory(x) not in given]
        self._graph.made += new
        is_view = func.namespace == "aten" and not func._schema.is_mutable and not new
        if is_view or "empty" in func.name():
            return

        def again():
            found = func(*map(_now, args), **kwargs)
            if func.namespace == "c10d":  # on a CPU the host waits for a collective
                [work] = [x for x in tree_leaves(found) if not torch.is_tensor(x)]
                work.wait()
            for output, result in zip(outputs, _tensors(found), strict=True):
                if _memory(output) != _memory(result):
                    output.copy_(result)

        self._graph.steps.append(again)

    def launch(self, kernel):
        """Run a kernel, and note it instead of the operations in it."""
        self._is_noting = False
        try:
            return kernel()
        finally:
            self._is_noting = True
            self._graph.steps.append(kernel)


def _tensors(values):
    return [x for x in tree_leaves(values) if torch.is_tensor(x)]


def _now(argument):
    """A tensor that something outside the graph writes before each replay says itself what it holds."""
    return argument.latest() if hasattr(argument, "latest") else argument


def _memory(x):
    return x.untyped_storage().data_ptr()


def _spoil(x):
    if x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype != torch.bool:
        x.fill_(7_777 if x.dtype in (torch.int32, torch.int64) else 77)


_run = InterpretedFunction.run


def run_or_note(self, *args, **kwargs):
    def kernel():
        return _run(self, *args, **kwargs)

    return kernel() if Capture.running is None else Capture.running.launch(kernel)


def install(setattr=setattr):
    setattr(InterpretedFunction, "run", run_or_note)
    setattr(torch.cuda, "CUDAGraph", Graph)
    setattr(torch.cuda, "graph", Capture)
    setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    setattr(torch.cuda, "is_current_stream_capturing", lambda: Capture.running is not None)
