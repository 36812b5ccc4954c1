"""For programs, before all else: vLLM's CPU engine takes MRV2, and Triton interprets its kernels, fast."""

# ruff: noqa: F401, I001 (what is imported depends on what comes before)
import dataclasses
import functools
import gc
import inspect
import os
from types import SimpleNamespace
from typing import Any

import rollout_spec_lab.bench.triton_on_cpu

import numpy as np
import torch
import triton.language as tl
from triton.language import random
from triton.language.extra import libdevice
from triton.runtime import interpreter

from rollout_spec.patches import when_imported
from tests.engine.conftest import ENVIRONMENT, collect_unless_vllm_asks

os.environ |= ENVIRONMENT
gc.collect = collect_unless_vllm_asks

_patch_lang, _patched = interpreter._patch_lang, set[bool]()


def patch_lang_once(function):
    """Triton's language is the interpreter's for good; by itself it is so for each call of each function."""
    has_all = tl in function.__globals__.values()  # else the core of the language only
    if has_all not in _patched:
        _patched.add(has_all)
        _patch_lang(function)
    return SimpleNamespace(restore=lambda: None)


def numpy_type(of):
    """Triton's own makes a table in each call."""
    scalar = of.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_type(scalar)


class LazyType:
    """The type of Triton's tuples. Every tensor has one, its shape, and hardly any is asked for its type."""

    def __get__(self, values, owner=None):
        return values.__dict__.get("type") or tl.core._type_for_tuple_values(values.values)

    def __set__(self, values, given):
        values.__dict__["type"] = given


def make_tuple(self, args, type=None):
    self.values = [*args]
    self.type = type if type is None or isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def unpinned(*args, pin_memory=False, **kwargs):
    """`torch.tensor`: vLLM 0.24 pins the rows of a grammar also where there is no GPU."""
    return _tensor(*args, **kwargs)


def tensor(data, like):
    return tl.tensor(interpreter.TensorHandle(data, like.handle.dtype), like.type)


def log1p(x):
    return tensor(np.log1p(x.handle.data), x)


def philox(*given):
    *state, num_rounds = given
    c0, c1, c2, c3, k0, k1 = (each.handle.data.astype(np.uint64) for each in state)
    low, up = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(int(num_rounds)):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = b >> up ^ c1 ^ k0, b & low, a >> up ^ c3 ^ k1, a & low
        k0, k1 = k0 + np.uint64(0x9E3779B9) & low, k1 + np.uint64(0xBB67AE85) & low
    return tuple(tensor(each.astype(np.uint32), state[0]) for each in (c0, c1, c2, c3))


def murmur3(seed, pos, offset, domain=0):
    """`murmur3_hash32` of vLLM 0.32."""
    seed, pos = (np.atleast_1d(each.handle.data).astype(np.int64) for each in (seed, pos))
    offset, thirty_two = offset.to(tl.uint32), np.int64(32)
    h = np.full(1, int(domain), np.uint32)
    for key in (seed, seed >> thirty_two, pos, offset.handle.data):
        h = h ^ _rotated(key.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        h = _rotated(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h = h ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    return tensor(h ^ h >> np.uint32(16), offset)


def _rotated(words, shift):
    return words << np.uint32(shift) | words >> np.uint32(32 - shift)


_tensor, torch.tensor = torch.tensor, unpinned
_numpy_type = functools.cache(interpreter._get_np_dtype)
interpreter._patch_lang = patch_lang_once
interpreter._get_np_dtype = numpy_type
tl.core.tuple.type, tl.core.tuple.__init__ = LazyType(), make_tuple
# Half of the time went into sums that only a debug build checks.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
libdevice.log1p = log1p
random.philox_impl = philox


def hash_by_numpy(gumbel):
    if hasattr(gumbel, "murmur3_hash32"):
        gumbel.murmur3_hash32 = murmur3


def warm_up_as_on_gpus(cpu_worker):
    """With requests that vLLM makes up, as its worker for GPUs does."""
    warm_up = cpu_worker.CPUWorker.compile_or_warm_up_model

    def warm_up_with_requests(self):
        if self.vllm_config.use_v2_model_runner:
            from vllm.v1.worker.gpu.warmup import warmup_kernels

            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return warm_up(self)

    cpu_worker.CPUWorker.compile_or_warm_up_model = warm_up_with_requests


class Language:
    """Triton's, for a kernel that loops over rows. A number of the interpreter's own loop has no `to`."""

    def __getattr__(self, name):
        return getattr(tl, name)

    @staticmethod
    def range(*limits):
        for number in range(*(int(each.handle.data.item()) for each in limits)):
            yield interpreter._implicit_cvt(number)


def make_anew(module, name, edits):
    source = inspect.getsource(getattr(module, name))
    for before, after in edits.items():
        source = source.replace(before, after)
    exec(source, vars(module))


def interpret_kernels(topk_topp_triton):
    """Of top-k and top-p, chosen by the number of rows as on CUDA."""
    # By the processors of the device vLLM 0.32 decides in how many parts a row is searched.
    topk_topp_triton.num_compute_units = lambda *_: 16
    topk_topp_triton.language, topk_topp_triton.tl = topk_topp_triton.tl, Language()
    small_blocks = {"8192, 4096": "256, 128"}  # as later vLLMs than 0.24 have them on a CPU
    edits = {'logits.device.type == "cuda"': "True"} | small_blocks
    make_anew(topk_topp_triton, "apply_top_k_top_p_triton", edits)


choose_by_rows = {"name": "apply_top_k_top_p", "edits": {"current_platform.is_cpu()": "False"}}
cut_by_the_kernel = {"name": "cut_rows_alike", "edits": {'logits.device.type == "cpu"': "False"}}
when_imported("vllm.v1.worker.cpu_worker", warm_up_as_on_gpus)
when_imported("vllm.v1.sample.ops.topk_topp_triton", interpret_kernels)
when_imported("vllm.v1.sample.ops.topk_topp_sampler", functools.partial(make_anew, **choose_by_rows))
when_imported("rollout_spec.vllm.both_runners.top_k_top_p", functools.partial(make_anew, **cut_by_the_kernel))
when_imported("vllm.v1.worker.gpu.sample.gumbel", hash_by_numpy)
