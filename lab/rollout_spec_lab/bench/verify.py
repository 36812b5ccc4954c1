"""Verification alone: what it takes beside vLLM's, where the host waits in it, and a device's tokens.

Each method goes from a step's bfloat16 logits to its tokens, bonus tokens included, at temperature 1.
They take turns, in another order in each round. On a CPU the clock is the processor time of one thread.
"""

import functools
import random
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from rollout_spec.config import UserError
from rollout_spec.verification import coupled, noise
from rollout_spec_lab.bench.cpu_rejection import mend_cpu_rejection
from rollout_spec_lab.bench.waits import sentence, synchronize, waits

SECONDS, LEAST, MOST = 0.5, 3, 50  # of a method in a cell; rounds, at least and at most
NUM_ALONE = 64  # rows whose tokens are drawn alone too
JUDGED, MOST_OVER_VLLM = (64, 7), 1.5  # a cell, and how many times vLLM's own time ours may take there
KEPT = {"top-k": 20, "top-p": 0.95}
Call = Callable[[], torch.Tensor]
Cut = Callable[..., torch.Tensor]  # of logits, top-k and top-p


class Step:
    """One step's logits and drafts; half of the draft tokens are the best ones.

    Normal logits with a standard deviation of 3, the largest raised by 6: its probability is about 0.95.
    """

    def __init__(self, rows: int, k: int, vocab_size: int, device: torch.device) -> None:
        torch.manual_seed(rows * 100 + k)
        self.device = device
        self.logits = torch.empty(rows * (k + 1), vocab_size, dtype=torch.bfloat16, device=device)
        for part in self.logits.split(256):
            part.normal_().mul_(3)
        best = self.logits.argmax(dim=-1, keepdim=True)
        self.logits.scatter_(1, best, self.logits.gather(1, best) + 6)
        best = best[: rows * k, 0]
        is_right = torch.rand(rows * k, device=device) < 0.5
        self.drafts = torch.where(is_right, best, (best + 1) % vocab_size).int()
        self.counts, self.k, self.rows = [k] * rows, k, rows
        self.ends = torch.arange(1, rows + 1, dtype=torch.int32, device=device) * k
        self.keys, self.positions = np.arange(rows), np.full(rows, 100)
        self.metadata = types.SimpleNamespace(
            temperature=torch.ones(rows, device=device), all_greedy=False, all_random=True, generators={},
            top_k=None, top_p=None,
        )  # fmt: skip

    def methods(self) -> dict[str, Call]:
        """`vllm` where it can be imported, and `cuts`; `read`: reading every logit once, the least of all."""
        found: dict[str, Call] = {"coupled": self._coupled}
        if (of_vllm := vllms(self.device.type)) is not None:
            found["vllm"] = functools.partial(self._rejecting, *of_vllm)
        for name, cut in cuts(self.device.type).items():
            found |= {f"{kind}, {name}": functools.partial(self.cut, cut, kind) for kind in KEPT}
        return found | {"read": lambda: self.logits.amax(dim=-1)}

    def cut(self, cut: Cut, kind: str) -> torch.Tensor:
        """The step's logits, -inf where `kind` of `KEPT` keeps no token."""
        number = torch.full((len(self.logits),), KEPT[kind], device=self.device)
        logits = self.logits.float()  # changed in place
        return cut(logits, number, None) if kind == "top-k" else cut(logits, None, number)

    def _coupled(self) -> torch.Tensor:
        step_noise = coupled.StepNoise(self.keys, self.positions, self.counts)
        verify = functools.partial(coupled.coupled_verify, self.drafts, self.k)
        return self._tokens(verify, step_noise.sample_after, True, step_noise)

    def _rejecting(self, verify: Callable[..., Any], sample: Callable[..., Any]) -> torch.Tensor:
        verify = functools.partial(verify, self.drafts, self.counts, self.k, self.ends, None)
        return self._tokens(verify, sample, self.metadata)

    def _tokens(self, verify: Callable[..., Any], sample: Callable[..., Any], *further: Any) -> torch.Tensor:
        """In float32: `sample` draws after the drafts."""
        ahead = self.rows * self.k
        bonus = sample(self.logits[ahead:].float()).view(-1, 1)
        if not self.k:
            return bonus
        return verify(self.logits[:ahead].float(), bonus, *further)


@functools.cache
def vllms(device: str) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """vLLM's verification and its sampling of bonus tokens; None where there is none for the device."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, random_sample
    except ImportError:
        return None
    if device == "cuda":
        return rejection_sampler.rejection_sample, lambda logits: random_sample(logits.softmax(dim=-1), {})
    if device != "cpu" or not current_platform.is_cpu():  # a build for GPUs has no kernels for CPUs
        return None
    from vllm.utils import cpu_triton_utils

    mend_cpu_rejection()
    register = getattr(current_platform, "register_triton_kernel_overrides", None)
    if register is not None:  # from 0.32 on
        register()
    else:
        kernels = (f"rejection_{kind}_sample_kernel" for kind in ("greedy", "random"))
        for name in (*kernels, "expand_kernel", "sample_recovered_tokens_kernel"):
            setattr(rejection_sampler, name, getattr(cpu_triton_utils, name))
    sampler = TopKTopPSampler()
    return rejection_sampler.rejection_sample, lambda logits: sampler.forward_cpu(logits, {}, None, None)[0]


@functools.cache
def cuts(device: str) -> dict[str, Cut]:
    """Top-k and top-p on CUDA: as engines with `coupled` cut all rows, and as vLLM does by their number."""
    if device != "cuda":
        return {}
    from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton

    def alike(*given: Any) -> torch.Tensor:
        with mock.patch.object(topk_topp_triton, "_SPLIT_MAX_BATCH", 0, create=True):
            return topk_topp_triton.apply_top_k_top_p_triton(*given)

    return {"alike": alike, "vllm's": topk_topp_sampler.apply_top_k_top_p}


def record_of(
    name: str | None, nums_rows: Sequence[int], nums_drafts: Sequence[int], vocab_size: int
) -> Iterator[dict[str, Any]]:
    """What `bench verify --json` prints, after each cell; a UserError if there is no device `name`.

    cells: rows, k, ms and waits of each method (None: not counted); `skipped`: those still to come.
    """
    device, label = device_of(name), "cpu"
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        label = torch.get_device_module(device).get_device_name()
    wanted = [(rows, k) for rows in nums_rows for k in nums_drafts]
    record = {"device": label, "torch": torch.__version__, "vocab_size": vocab_size, "cells": []}
    with torch.inference_mode():  # as in vLLM
        record["comparison"] = compare_to_cpu(device, vocab_size)
        for number, (rows, k) in enumerate(wanted, start=1):
            calls = Step(rows, k, vocab_size, device).methods()
            cell = {"rows": rows, "k": k, "ms": _milliseconds(calls, device)}
            record["cells"].append(cell | {"waits": {name: _waits(call) for name, call in calls.items()}})
            record["skipped"] = [f"{rows} rows, {k} drafts: not reached" for rows, k in wanted[number:]]
            yield record


def device_of(name: str | None) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return found or torch.device("cpu")
    if name != "cpu" and (found is None or name != found.type):
        raise UserError(
            f"--device {name}: must be cpu{f' or {found.type}' if found else ', none other is here'}"
        )
    return torch.device(name)


def _waits(call: Call) -> list[str] | None:
    with waits() as places:
        call()
    return places


def _milliseconds(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """Medians, each alone on the device, until its tokens are there."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in calls}
    rng, end = random.Random(0), time.perf_counter() + SECONDS * len(calls)
    for number in range(-LEAST, MOST):
        if number >= LEAST and time.perf_counter() > end:
            break
        for name, call in rng.sample(list(calls.items()), len(calls)):
            synchronize()
            began = clock()
            call()
            synchronize()
            found[name].append(1e3 * (clock() - began))
    return {name: statistics.median(times[LEAST:]) for name, times in found.items()}


def compare_to_cpu(device: torch.device, vocab_size: int) -> dict[str, Any]:
    """The device against the CPU: bits of noise, tokens of the same logits; tokens alone and in a batch.

    largest_shortfall: of the tokens that differ, the error of a logit that makes one win.
    """
    noise.check(device)
    logits = Step(32, 7, vocab_size, device).logits.float()
    seeds, places = noise.row_seeds(np.arange(1024) * 7919, np.arange(1024)), (logits.cpu(), logits)
    here, there = (coupled.race_noise(seeds, each).cpu() for each in places)
    words = [noise.random_words(seeds, here.shape[1], each.device).cpu() for each in places]
    ulps = (here.view(torch.int32) - there.view(torch.int32)).abs()
    keys, positions = torch.arange(len(logits)) * 104729, torch.arange(len(logits))
    found: dict[str, Any] = {
        "words": words[0].numel(), "words_that_differ": int((words[0] != words[1]).sum()),
        "noise_that_differs": int((ulps > 0).sum()), "noise_largest_ulps": int(ulps.max()),
    }  # fmt: skip
    for name, values in (("peaked", logits), ("flat", logits / 3)):  # less peaked: closer races
        there = _drawn(values, keys, positions).cpu()
        here = _drawn(values.cpu(), keys, positions)
        rows = [slice(i, i + 1) for i in range(NUM_ALONE)]
        alone = torch.cat([_drawn(values[i], keys[i], positions[i]) for i in rows])
        missed = coupled.shortfall(values.cpu(), keys, positions, there)
        found[name] = {
            "tokens": len(here), "differ_from_cpu": int((here != there).sum()),
            "largest_shortfall": float(missed.max()),
            "differ_alone": int((alone.cpu() != there[:NUM_ALONE]).sum()),
        }  # fmt: skip
    return found


def _drawn(logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return coupled.StepNoise(keys, positions, [0] * len(logits)).sample_after(logits)


def sentences(record: Mapping[str, Any]) -> Iterator[str]:
    """Whether the device draws what a CPU draws and the host waits as documented, and the time it takes."""
    cells = record["cells"]
    yield from _of_comparison(record["comparison"])
    yield sentence({"with drafts" if cell["k"] else "plain": cell["waits"]["coupled"] for cell in cells})
    beside = [cell for cell in cells if "vllm" in cell["ms"]]
    for cell in [cell for cell in beside if (cell["rows"], cell["k"]) == JUDGED] or beside[-1:]:
        ours, theirs = cell["ms"]["coupled"], cell["ms"]["vllm"]
        yield (
            f"Verification of {cell['rows']} rows with {cell['k']} drafts takes {ours:.2f} ms, "
            f"{ours / theirs:.2f} times vLLM's: {'more' if ours > MOST_OVER_VLLM * theirs else 'not more'} "
            f"than the {MOST_OVER_VLLM} times that we allow."
        )
    for kind in KEPT:
        ratios = [
            (cell["ms"][f"{kind}, alike"] / cell["ms"][f"{kind}, vllm's"], cell["rows"] * (1 + cell["k"]))
            for cell in cells
            if f"{kind}, alike" in cell["ms"]
        ]
        if ratios:
            most, rows = max(ratios)
            yield f"Cutting all rows alike by {kind} takes {most:.2f} times vLLM's at most, with {rows} rows."


def _of_comparison(compared: Mapping[str, Any]) -> Iterator[str]:
    differ = max(compared["words_that_differ"], compared["noise_that_differs"])
    yield (
        f"{differ:,} of {compared['words']:,} random numbers differ from a CPU's, by "
        f"{compared['noise_largest_ulps']} units in the last place at most."
        if differ
        else f"The device's random numbers are a CPU's, bit for bit: {compared['words']:,} of them."
    )
    kinds = compared["peaked"], compared["flat"]
    total, others, alone = (
        sum(kind[name] for kind in kinds) for name in ("tokens", "differ_from_cpu", "differ_alone")
    )
    yield (
        f"{others} of {total} tokens differ from a CPU's (the largest error of a logit that explains one: "
        f"{max(kind['largest_shortfall'] for kind in kinds):.1e}), {alone} from those drawn alone."
    )
