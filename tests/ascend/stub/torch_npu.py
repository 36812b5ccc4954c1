"""A stub of torch_npu, for machines without an NPU: vllm-ascend can be imported with it, and runs on the CPU.

Torch loads it as it loads the real one, by the entry point beside it. Whatever is asked of `torch.npu`, of
this module or of Ascend's other libraries is there and does nothing. The functions below alone do their work:
those that samplers call, and a dense model in eager mode.
"""

import collections
import importlib
import importlib.abc
import importlib.machinery
import itertools
import sys
from unittest.mock import MagicMock

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

LIBRARIES = ("acl", "npugraph_ex")
MEMORY = 1 << 29  # bytes
HOST = torch.device("cpu")


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Ascend's libraries that are not there, and makes each of mocks."""

    def find_spec(self, fullname, path=None, target=None):
        top, _, rest = fullname.partition(".")
        if top in LIBRARIES or (top == __name__ and rest):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_rest, name)


def npu_top_k_top_p(logits, p=None, k=None):
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


def npu_rms_norm(x, weight, eps=1e-6):
    scale = x.float().pow(2).mean(dim=-1, keepdim=True).add(eps).rsqrt()
    return (x.float() * scale).to(x.dtype) * weight, scale


def npu_add_rms_norm(x, residual, weight, eps=1e-6):
    x = x + residual
    return *npu_rms_norm(x, weight, eps), x


def npu_swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Turns both in place, [tokens, heads x head_size]."""
    assert is_neox_style
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for turned in (query, key):
        heads = turned.view(len(turned), -1, head_size)
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _npu_reshape_and_cache(*, key, value, key_cache, value_cache, slot_indices):
    """Writes both into the caches, [blocks, block_size, heads, head_size], but for slots of padding."""
    kept = slot_indices >= 0
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slot_indices[kept].long()] = new[kept]


def npu_fused_infer_attention_score(
    *, query, key, value, num_heads,
    num_key_value_heads, scale, actual_seq_lengths, actual_seq_lengths_kv,
    block_table, input_layout, sparse_mode, **_,
):  # fmt: skip
    """Causal attention of requests that follow each other, [tokens, heads, head_size].

    Without a block table keys and values follow each other as well, and the second lengths are ends as the
    first are; with one they lie in the caches.
    """
    assert input_layout == "TND" and sparse_mode == 3
    head_size, begin, outputs = query.shape[-1], 0, []
    for row, end in enumerate(actual_seq_lengths):
        known = [cache[begin:end] for cache in (key, value)]
        if block_table is not None:
            length = actual_seq_lengths_kv[row]
            blocks = block_table[row, : -(-length // key.shape[1])].long()
            known = [cache[blocks].flatten(0, 1)[:length] for cache in (key, value)]
        keys, values = (
            one.reshape(len(one), num_key_value_heads, head_size).transpose(0, 1) for one in known
        )
        mask = torch.ones(end - begin, keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - (end - begin))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1), keys, values, mask, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
        begin = end
    return torch.cat(outputs), None


def stand_in_for_triton():
    """vLLM loads this as a plugin: the one kernel of its model runner that has no other path."""
    from vllm.v1.worker import block_table

    block_table._compute_slot_mapping_kernel = collections.defaultdict(lambda: _compute_slot_mapping)


def _compute_slot_mapping(
    num_tokens, max_num_tokens, query_start_loc, positions,
    block_table, stride, block_size, slot_mapping, *,
    PAD_ID, **_,  # noqa: N803
):  # fmt: skip
    rows = torch.arange(len(query_start_loc) - 1).repeat_interleave(query_start_loc.diff())
    positions = positions[: len(rows)]
    slots = block_table[rows, positions // block_size] * block_size + positions % block_size
    slot_mapping[: len(rows)], slot_mapping[len(rows) :] = slots, PAD_ID


class _OnTheHost(TorchFunctionMode):
    """What is to be made on an NPU, or brought to one, stays on the CPU, and pins no memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if _is_npu(kwargs.get("device")):
            kwargs["device"] = HOST
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(HOST if _is_npu(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_npu(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("npu")


def _autoload():
    """What torch calls when it is imported."""


__path__: list[str] = []
__version__ = "2.10.0"
_rest = MagicMock(name=__name__)
_bytes_taken = itertools.count()  # vLLM takes nothing for a profile that shows no memory taken
sys.meta_path.insert(0, _Nothing())
torch.utils.rename_privateuse1_backend("npu")  # torch.device("npu")
torch.npu = MagicMock(name="torch.npu")  # type: ignore[attr-defined]
npu = torch.npu
torch.npu.is_available = lambda: True
torch.npu.device_count = lambda: 1
torch.npu.current_device = lambda: 0
torch.npu.get_soc_version = lambda: 220  # of a 910B
torch.npu.mem_get_info = lambda *_: (MEMORY - next(_bytes_taken), MEMORY)
torch.npu.memory_stats = lambda *_: {}
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
    setattr(torch.npu, _name, lambda *_: 0)
torch.npu.get_device_name = lambda *_: "stub of an NPU"
torch.npu.get_device_capability = lambda *_: None  # as the real one, which verl knows
for _name in ("synchronize", "set_device_index"):
    setattr(torch.accelerator, _name, lambda *_: None)
torch.accelerator.current_device_index = lambda: 0
_OnTheHost().__enter__()
torch.Tensor.npu = lambda self, *_, **__: self  # type: ignore[attr-defined]
_impl = torch.library.Library.impl
_host_keys = {("vllm", "PrivateUse1"): "CPU"}
torch.library.Library.impl = lambda self, name, function, dispatch_key="", **kwargs: _impl(
    self, name, function, _host_keys.get((self.ns, dispatch_key), dispatch_key), **kwargs
)
torch.distributed.is_hccl_available = lambda: False  # type: ignore[attr-defined]
# vllm-ascend patches these and loads them again.
for _name in ("npugraph_ex.npu_fx_compiler", "npugraph_ex.core._concrete_graph"):
    importlib.import_module(_name)
_reload = importlib.reload
importlib.reload = lambda module: module if isinstance(module, MagicMock) else _reload(module)
