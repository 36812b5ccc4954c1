"""Time of verification: ours, vLLM's on the CPU and the functions that vllm-ascend 0.11.0 published, side by
side.

    python benchmarks/verify.py --output FILE

Each is timed from the logits of a step, temperature applied, to its tokens, bonus tokens included; no top-k,
no top-p. K = 0 is a plain step, one token a request, as while the gate is shut. `functions` are vllm-ascend's
alone, from the probabilities and the bonus tokens that they are given; `in their place` is what
`verify=standard` puts there. Of small batches several steps take turns. The clock is the thread's processor
time, on one thread, so that other work on the machine counts little; all take turns, in another order in
every round. vllm-ascend's functions are taken from its source as they stand. vLLM's kernel for recovered
tokens fails on the CPU for an argument it does not know; here it does not get it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import platform
import random
import statistics
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

from rollout_spec import keyed, verify

PUBLISHED = (
    Path(__file__).parents[1] / "tests/data/vllm-ascend-0.11.0/vllm_ascend/sample/rejection_sampler.py"
)
VOCAB_SIZES = (32_000, 151_936)
BATCH_SIZES = (1, 8, 64, 256)
NUMS_SPECULATIVE_TOKENS = (0, 3, 8)
NUM_REQUESTS = 40  # of all steps of a small batch together
TARGETS = {"vllm-ascend / coupled": 10.0, "vllm / coupled": 1.0}
# The columns behind the time of `coupled`.
RATIOS = (
    ("vllm-ascend", "coupled"), ("vllm", "coupled"), ("vllm-ascend", "standard"), ("vllm", "standard"),
    ("functions", "in their place"), ("vllm-ascend", "noise"), ("coupled", "read"),
)  # fmt: skip


def published_functions(file: Path) -> types.SimpleNamespace:
    """The functions of vllm-ascend's rejection sampler, without its imports and its class."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign))]
    # The last statement replaces a function of vLLM's.
    tree.body = [
        n for n in tree.body if not isinstance(n, ast.Assign) or not isinstance(n.targets[0], ast.Attribute)
    ]
    names: dict[str, Any] = {"torch": torch, "Optional": __import__("typing").Optional}
    names["SamplingMetadata"] = Any
    names["generate_uniform_probs"] = rejection_sampler.generate_uniform_probs
    exec(compile(tree, str(file), "exec"), names)
    return types.SimpleNamespace(**names)


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
    """One step's logits and drafts; about so many of the draft tokens are the target's best."""

    def __init__(
        self, batch_size: int, k: int, vocab_size: int, seed: int = 0, share_best: float = 0.5
    ) -> None:
        torch.manual_seed(seed)
        num_tokens = batch_size * k
        self.logits = torch.randn(num_tokens, vocab_size).mul_(3)
        self.bonus_logits = torch.randn(batch_size, vocab_size).mul_(3)
        best = self.logits.argmax(dim=-1)
        self.drafts = torch.where(torch.rand(num_tokens) < share_best, best, (best + 1) % vocab_size).int()
        self.logits[torch.arange(num_tokens), best] += 12  # peaked, so that drafts are accepted
        self.counts, self.k = [k] * batch_size, k
        self.ends = torch.arange(k, num_tokens + 1, k, dtype=torch.int32)
        self.keys, self.positions = np.arange(batch_size), np.full(batch_size, 100)
        self.metadata = types.SimpleNamespace(
            temperature=torch.ones(batch_size), all_greedy=False, all_random=True, generators={}
        )

    def given(self) -> tuple[Any, ...]:
        return self.drafts, self.counts, self.k, self.ends

    def coupled(self) -> torch.Tensor:
        step = keyed.KeyedStep(self.keys, self.positions, self.counts)
        bonus = step.sample_behind(self.bonus_logits).unsqueeze(-1)
        return verify.coupled_sample(self.drafts, self.k, self.logits, bonus, self.metadata, step)

    def noise(self) -> torch.Tensor:
        """What `coupled` begins with, whatever the logits: the rows' noise, and nothing else."""
        step = keyed.KeyedStep(self.keys, self.positions, self.counts)
        return step._noise(self.logits)

    def standard(self) -> torch.Tensor:
        bonus = compiled_random_sample(self.bonus_logits).unsqueeze(-1)
        return verify.rejection_sample(*self.given(), None, self.logits, bonus, self.metadata)

    def vllm(self) -> torch.Tensor:
        bonus = compiled_random_sample(self.bonus_logits).unsqueeze(-1)
        return rejection_sampler.rejection_sample(*self.given(), None, self.logits, bonus, self.metadata)

    def read(self) -> Any:
        """Reading every logit once, the least that any method does."""
        return self.logits.amax(dim=-1), self.bonus_logits.amax(dim=-1)

    def ascend(self, published: types.SimpleNamespace) -> torch.Tensor:
        bonus = random_sample(self.bonus_logits.softmax(dim=-1), {}).unsqueeze(-1)
        temperature = published.expand_batch_to_tokens(
            self.metadata.temperature, self.ends, len(self.drafts), replace_from=-1, replace_to=1
        )
        probs = self.logits.div_(temperature.unsqueeze(-1)).softmax(dim=-1)
        return published.rejection_sample(*self.given(), None, probs, bonus, self.metadata)

    def contestants(self, published: types.SimpleNamespace) -> dict[str, Callable[[], Any]]:
        probs = self.logits.softmax(dim=-1)
        given = (
            *self.given(),
            None,
            probs,
            torch.zeros(len(self.counts), 1, dtype=torch.int32),
            self.metadata,
        )
        return {
            "coupled": self.coupled,
            "standard": self.standard,
            "vllm": self.vllm,
            "vllm-ascend": functools.partial(self.ascend, published),
            "functions": functools.partial(published.rejection_sample, *given),
            "in their place": functools.partial(verify.rejection_sample, *given, target_is_probs=True),
            "noise": self.noise,
            "read": self.read,
        }


class PlainStep:
    """One step without drafts: a token for every request."""

    def __init__(self, batch_size: int, vocab_size: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.logits = torch.randn(batch_size, vocab_size).mul_(3)
        self.counts = [0] * batch_size
        self.keys, self.positions = np.arange(batch_size), np.full(batch_size, 100)

    def coupled(self) -> torch.Tensor:
        step = keyed.KeyedStep(self.keys, self.positions, self.counts)
        return step.sample_behind(self.logits)

    def vllm(self) -> torch.Tensor:
        return compiled_random_sample(self.logits)

    def ascend(self) -> torch.Tensor:
        return random_sample(self.logits.softmax(dim=-1), {})

    noise = Step.noise

    def read(self) -> torch.Tensor:
        return self.logits.amax(dim=-1)

    def contestants(self, published: types.SimpleNamespace) -> dict[str, Callable[[], Any]]:
        """`verify=standard` leaves such steps to vLLM's sampler."""
        return {
            "coupled": self.coupled,
            "standard": self.vllm,
            "vllm": self.vllm,
            "vllm-ascend": self.ascend,
            "noise": self.noise,
            "read": self.read,
        }


def same_tokens(published: types.SimpleNamespace) -> bool:
    """Whether `verify.rejection_sample`, vLLM's and vllm-ascend's give a seeded request the same tokens."""
    step = Step(64, 8, 1000)
    bonus = torch.arange(64, dtype=torch.int32).unsqueeze(-1)
    outputs = []
    for function, weights in (
        (verify.rejection_sample, step.logits),
        (rejection_sampler.rejection_sample, step.logits),
        (published.rejection_sample, step.logits.softmax(dim=-1)),
    ):
        step.metadata.generators = {i: torch.Generator().manual_seed(i) for i in range(64)}
        outputs.append(function(*step.given(), None, weights, bonus, step.metadata))
    return torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


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


def measure(
    published: types.SimpleNamespace, repeats: int, batch_sizes: list[int], share_best: float
) -> dict[str, Any]:
    for batch_size in (1, 2, 3):  # until torch.compile has seen that sizes vary
        times_ms([{"vllm": Step(batch_size, 2, 1000 + batch_size).vllm}], 1)
    cells = []
    for vocab_size in VOCAB_SIZES:
        for batch_size in batch_sizes:
            for k in NUMS_SPECULATIVE_TOKENS:
                calls = []
                for seed in range(max(1, NUM_REQUESTS // batch_size)):
                    step = (
                        Step(batch_size, k, vocab_size, seed, share_best)
                        if k
                        else PlainStep(batch_size, vocab_size, seed)
                    )
                    calls.append(step.contestants(published))
                times = times_ms(calls, repeats)
                ratios = {
                    f"{name} / {other}": statistics.quantiles(
                        [a / b for a, b in zip(times[name], times[other], strict=True)], n=4
                    )
                    for name, other in RATIOS
                    if name in times
                }
                cell = {"vocab_size": vocab_size, "batch_size": batch_size, "k": k, "ratios": ratios}
                cells.append(cell | {"ms": {name: statistics.median(ms) for name, ms in times.items()}})
                print(_row(cells[-1]), flush=True)
    return {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "targets": TARGETS,
        "share_best": share_best,
        "same_tokens_for_the_same_seed": same_tokens(published),
        "cells": cells,
    }


def _row(cell: dict[str, Any]) -> str:
    """A line of the record's table: the median time, and the ratios' medians and quartiles."""
    columns = [f"{cell['vocab_size']:,}", str(cell["batch_size"]), str(cell["k"])]
    columns.append(f"{cell['ms']['coupled']:.2f}")
    ratios = (cell["ratios"].get(f"{name} / {other}") for name, other in RATIOS)
    columns += ["{1:.1f} ({0:.1f}-{2:.1f})".format(*ratio) if ratio else "" for ratio in ratios]
    return f"| {' | '.join(columns)} |"


def share_of_decode_steps(model: str) -> dict[str, float]:
    """The share of an engine's time that goes into drawing tokens, with the demo's policy and options.

    verification: our part; sampler: all of vLLM's `RejectionSampler`, with what it does before (penalties,
    top-k, top-p) and behind it: log-probabilities, which verl asks for. Plain steps have no such sampler.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from rollout_spec import vllm_sampler
    from rollout_spec.demo.data import make_rows

    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512,
        enforce_eager=True, kv_cache_memory_bytes=1 << 28,
        speculative_config={
            "method": "custom_class",
            "model": "rollout_spec.vllm_proposer.SuffixProposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"rollout_spec": {"batch_threshold": "auto"}},
    )  # fmt: skip
    spent = {"verification": 0.0, "sampler": 0.0}

    def timed(function: Callable[..., Any], part: str = "verification") -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent[part] += time.perf_counter() - start
            return result

        return call

    messages = [row["prompt"] for row in make_rows(2, 0, "bench") for _ in range(8)]
    params = SamplingParams(temperature=0.7, max_tokens=256, logprobs=0)
    llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)  # the prompts, for the prefix cache
    verify.coupled_sample = timed(verify.coupled_sample)
    vllm_sampler.RowSampling._rows = timed(vllm_sampler.RowSampling._rows)
    keyed.KeyedStep.sample_behind = timed(keyed.KeyedStep.sample_behind)
    rejection_sampler.RejectionSampler.forward = timed(rejection_sampler.RejectionSampler.forward, "sampler")
    start = time.perf_counter()
    llm.chat(messages, params, use_tqdm=False)
    total = time.perf_counter() - start
    llm.llm_engine.engine_core.shutdown()
    return {
        "seconds": total,
        "verification_seconds": spent["verification"],
        "share": spent["verification"] / total,
        "sampler_share": spent["sampler"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--vllm-ascend", type=Path, metavar="FILE", default=PUBLISHED, help="its rejection_sampler.py"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES), metavar="N")
    parser.add_argument(
        "--share-best", type=float, default=0.5, metavar="P", help="of the draft tokens that are right"
    )
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--model", metavar="DIR", help="also the share of an engine's decode steps")
    args = parser.parse_args()
    torch._inductor.config.cpp.threads = 1  # of what vLLM has compiled
    use_cpu_kernels()
    published = published_functions(args.vllm_ascend)
    with torch.inference_mode():  # as in vLLM
        record = measure(published, args.repeats, args.batch_sizes, args.share_best)
    if args.model:
        record["decode_steps"] = share_of_decode_steps(args.model)
        print(record["decode_steps"])
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
