"""Time of verification: ours, vLLM's on the CPU, and vllm-ascend's where it is on PYTHONPATH.

    python -m rollout_spec_lab.studies.verify --output FILE

Each is timed from the logits of a step, temperature applied, to its tokens, bonus tokens included; no top-k,
no top-p. K = 0 is a plain step, one token a request. Of small batches several steps take turns. The clock is
the thread's processor time, on one thread, so that other work on the machine counts little. All contestants
take turns, in another order in every round. vllm-ascend takes its path without Triton.
vLLM's kernel for recovered tokens fails on the CPU for an argument it does not know; here it does not get it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch._inductor.config
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample, random_sample

from rollout_spec.verification import coupled, standard
from rollout_spec.vllm.ascend import MODULE, import_worker

VOCAB_SIZES = (32_000, 151_936)
BATCH_SIZES = (1, 8, 64, 256)
NUMS_SPECULATIVE_TOKENS = (0, 3, 8)
NUM_REQUESTS = 40  # of all steps of a small batch together
ASCEND = "vllm-ascend"
# The columns behind the time of `coupled`.
RATIOS = [("vllm", "coupled"), ("vllm", "standard"), ("coupled", "read")]
if importlib.util.find_spec("vllm_ascend"):
    RATIOS += [(ASCEND, "coupled"), (ASCEND, "standard")]


@functools.cache
def published_functions() -> Any:
    """vllm-ascend's module of the rejection sampler."""
    import_worker()
    module = importlib.import_module(MODULE)
    config = types.SimpleNamespace(enable_block_verify=False, enable_entropy_verify=False)
    config.posterior_threshold = config.posterior_alpha = 0.0
    options = types.SimpleNamespace(enable_reduce_sample=False, rejection_sampler_config=config)
    for user in (module, sys.modules["vllm_ascend.sample.sampler"]):
        user.get_ascend_config = lambda: options  # type: ignore[attr-defined]
    return module


def use_cpu_kernels() -> None:
    """As vLLM's CPU model runner does, and the recovered tokens' kernel without the argument it fails on."""
    for name in ("rejection_greedy_sample_kernel", "rejection_random_sample_kernel", "expand_kernel"):
        setattr(rejection_sampler, name, getattr(cpu_triton_utils, name))
    recovered = cpu_triton_utils._sample_recovered_tokens_kernel_impl

    def without_dtype(*args: Any, USE_FP64_GUMBEL: bool, **kwargs: Any) -> None:  # noqa: N803
        recovered(*args, **kwargs)

    wrapper = cpu_triton_utils._FuncWrapper(without_dtype)
    rejection_sampler.sample_recovered_tokens_kernel = wrapper


class Step:
    """One step's logits and drafts, both of peaked rows; about half of the draft tokens are the best ones.

    Normal logits with a standard deviation of 3, the largest raised by 6: its probability is about 0.95.
    """

    def __init__(self, batch_size: int, k: int, vocab_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        num_tokens = batch_size * k
        self.logits, best = peaked(num_tokens, vocab_size)
        self.bonus_logits, _ = peaked(batch_size, vocab_size)
        self.drafts = torch.where(torch.rand(num_tokens) < 0.5, best, (best + 1) % vocab_size).int()
        self.counts, self.k = [k] * batch_size, k
        self.ends = torch.tensor(self.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.keys, self.positions = np.arange(batch_size), np.full(batch_size, 100)
        self.metadata = types.SimpleNamespace(
            temperature=torch.ones(batch_size), all_greedy=False, all_random=True, generators={}
        )

    def coupled(self) -> torch.Tensor:
        step = coupled.CoupledStep(self.keys, self.positions, self.counts)
        bonus = step.sample_behind(self.bonus_logits).unsqueeze(-1)
        if not self.k:
            return bonus
        return coupled.coupled_sample(self.drafts, self.k, self.logits, bonus, self.metadata, step)

    def rejecting(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        bonus = compiled_random_sample(self.bonus_logits).unsqueeze(-1)
        if not self.k:
            return bonus
        given = (self.drafts, self.counts, self.k, self.ends, None, self.logits, bonus, self.metadata)
        return function(*given)

    def ascend(self) -> torch.Tensor:
        bonus = random_sample(self.bonus_logits.softmax(dim=-1), {}).unsqueeze(-1)
        if not self.k:
            return bonus
        published = published_functions()
        self.metadata.top_k = self.metadata.top_p = None
        logits = published.apply_sampling_constraints(self.logits, self.ends, self.metadata, None)
        given = (self.drafts, self.counts, self.k, self.ends, None, logits, bonus, self.metadata)
        return published.rejection_sample(*given)

    def read(self) -> Any:
        """Reading every logit once, the least that any method does."""
        return self.bonus_logits.amax(dim=-1), self.logits.amax(dim=-1) if self.k else None

    def contestants(self) -> dict[str, Callable[[], Any]]:
        all_of_them: dict[str, Callable[[], Any]] = {
            "coupled": self.coupled,
            "standard": functools.partial(self.rejecting, standard.rejection_sample),
            "vllm": functools.partial(self.rejecting, rejection_sampler.rejection_sample),
            ASCEND: self.ascend,
            "read": self.read,
        }
        compared = {name for pair in RATIOS for name in pair}
        return {name: call for name, call in all_of_them.items() if name in compared}


def peaked(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [num_rows, vocab_size] and the best token of each row."""
    logits = torch.randn(num_rows, vocab_size).mul_(3)
    best = logits.argmax(dim=-1)
    logits[torch.arange(num_rows), best] += 6
    return logits, best


def times_ms(steps: list[dict[str, Callable[[], Any]]], repeats: int) -> dict[str, list[float]]:
    """Each call's processor time, one after the other in each round, without a first third of the rounds.

    The steps take turns round by round. The contestants come in another order in each round: what one of them
    has run and read is in the caches for the next.
    """
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in steps[0]}
    start, num_rounds = time.perf_counter(), 0
    while num_rounds < 1.5 * repeats or (time.perf_counter() - start < 2 and num_rounds < 120):
        calls = list(steps[num_rounds % len(steps)].items())
        for name, call in rng.sample(calls, len(calls)):
            began = time.thread_time()
            call()
            times[name].append(1e3 * (time.thread_time() - began))
        num_rounds += 1
    return {name: values[num_rounds // 3 :] for name, values in times.items()}


def measure(batch_size: int, k: int, vocab_size: int, repeats: int) -> dict[str, Any]:
    """One cell of the table: median times, and the quartiles of ratios round by round."""
    seeds = range(max(1, NUM_REQUESTS // batch_size))
    steps = [Step(batch_size, k, vocab_size, seed).contestants() for seed in seeds]
    times = times_ms(steps, repeats)
    ratios = {
        f"{name} / {other}": statistics.quantiles(
            [a / b for a, b in zip(times[name], times[other], strict=True)], n=4
        )
        for name, other in RATIOS
    }
    cell = {"vocab_size": vocab_size, "batch_size": batch_size, "k": k, "ratios": ratios}
    return cell | {"ms": {name: statistics.median(ms) for name, ms in times.items()}}


def table_row(cell: dict[str, Any]) -> str:
    """A line of the record's table: the median time, and the ratios' medians and quartiles."""
    columns = [f"{cell['vocab_size']:,}", str(cell["batch_size"]), str(cell["k"])]
    columns.append(f"{cell['ms']['coupled']:.2f}")
    columns += ["{1:.1f} ({0:.1f}-{2:.1f})".format(*ratio) for ratio in cell["ratios"].values()]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds, at least (default 5)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES), metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch._inductor.config.cpp.threads = 1  # of what vLLM has compiled
    use_cpu_kernels()
    cells = []
    with torch.inference_mode():  # as in vLLM
        for batch_size in (1, 2, 3):  # until torch.compile has seen that sizes vary
            measure(batch_size, 2, 1000 + batch_size, 1)
        for vocab_size in VOCAB_SIZES:
            for batch_size in args.batch_sizes:
                for k in NUMS_SPECULATIVE_TOKENS:
                    cells.append(measure(batch_size, k, vocab_size, args.repeats))
                    print(table_row(cells[-1]), flush=True)
    if args.output:
        machine = platform.processor() or platform.machine()
        record = {"machine": machine, "threads": torch.get_num_threads(), "torch": torch.__version__}
        args.output.write_text(json.dumps(record | {"cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
