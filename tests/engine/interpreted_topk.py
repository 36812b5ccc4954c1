"""Triton's own kernels for top-k and top-p, interpreted, and chosen by the number of rows as on CUDA."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

NUM_PROCESSORS = 16  # of the device; by them vLLM 0.32 decides in how many parts a row is searched


class Language:
    """Triton's, for a kernel that loops over rows. A number of the interpreter's own loop has no `to`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def range(*limits: Any) -> Iterator[tl.tensor]:
        for number in range(*(int(each.handle.data.item()) for each in limits)):
            yield interpreter._implicit_cvt(number)


def make_anew(module: Any, name: str, edits: dict[str, str]) -> None:
    """A function, with edits of its source."""
    source = inspect.getsource(getattr(module, name))
    for before, after in edits.items():
        source = source.replace(before, after)
    exec(source, vars(module))


def interpret_kernels(topk_topp_triton: Any) -> None:
    topk_topp_triton.num_compute_units = lambda *_: NUM_PROCESSORS
    topk_topp_triton.language, topk_topp_triton.tl = topk_topp_triton.tl, Language()
    small_blocks = {"8192, 4096": "256, 128"}  # as later vLLMs than 0.24 have them on a CPU
    edits = {'logits.device.type == "cuda"': "True"} | small_blocks
    make_anew(topk_topp_triton, "apply_top_k_top_p_triton", edits)


choose_by_rows = functools.partial(
    make_anew, name="apply_top_k_top_p", edits={"current_platform.is_cpu()": "False"}
)
cut_by_the_kernel = functools.partial(
    make_anew, name="cut_rows_alike", edits={'logits.device.type == "cpu"': "False"}
)
