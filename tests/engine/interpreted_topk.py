"""Triton's own kernels for top-k and top-p, interpreted, and chosen by the number of rows as on CUDA."""

from __future__ import annotations

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


def answer(module: Any, name: str, question: str, is_so: bool) -> None:
    """Make a function anew, with the answer to what it asks."""
    exec(inspect.getsource(getattr(module, name)).replace(question, str(is_so)), vars(module))


def interpret_kernels(topk_topp_triton: Any) -> None:
    topk_topp_triton.num_compute_units = lambda *_: NUM_PROCESSORS
    topk_topp_triton.language, topk_topp_triton.tl = topk_topp_triton.tl, Language()
    answer(topk_topp_triton, "apply_top_k_top_p_triton", 'logits.device.type == "cuda"', True)


def choose_by_rows(topk_topp_sampler: Any) -> None:
    answer(topk_topp_sampler, "apply_top_k_top_p", "current_platform.is_cpu()", False)


def cut_by_the_kernel(top_k_top_p: Any) -> None:
    answer(top_k_top_p, "cut_rows_alike", 'logits.device.type == "cpu"', False)
