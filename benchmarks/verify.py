"""Time of verification: ours, vLLM's on the CPU and the functions that vllm-ascend 0.11.0 published, side by
side.

    pip download vllm-ascend==0.11.0 --no-deps && unzip vllm_ascend-0.11.0-*.whl
    python benchmarks/verify.py --vllm-ascend vllm_ascend/sample/rejection_sampler.py --output FILE

Each is timed from the logits of a step, temperature applied, to its tokens, bonus tokens included; no top-k,
no top-p. vllm-ascend's functions are taken from its source as they stand: its module needs an NPU to be
imported. vLLM's kernel for recovered tokens fails on the CPU for an argument it does not know; here it does
not get it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample, random_sample

from rollout_spec import verify

VOCAB_SIZES = (32_000, 151_936)
BATCH_SIZES = (1, 8, 64, 256)
NUMS_SPECULATIVE_TOKENS = (3, 8)
TARGETS = {"vllm-ascend / coupled": 10.0, "vllm / coupled": 1.0}


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
    """One step's logits and drafts; about half of the draft tokens are the target's best."""

    def __init__(self, batch_size: int, k: int, vocab_size: int) -> None:
        torch.manual_seed(0)
        num_tokens = batch_size * k
        self.logits = torch.randn(num_tokens, vocab_size).mul_(3)
        self.bonus_logits = torch.randn(batch_size, vocab_size).mul_(3)
        best = self.logits.argmax(dim=-1)
        self.drafts = torch.where(torch.rand(num_tokens) < 0.5, best, (best + 1) % vocab_size).int()
        self.logits[torch.arange(num_tokens), best] += 12  # peaked, so that drafts are accepted
        self.counts, self.k = [k] * batch_size, k
        self.ends = torch.arange(k, num_tokens + 1, k, dtype=torch.int32)
        self.keys, self.positions = torch.arange(batch_size), torch.full((batch_size,), 100)
        self.metadata = types.SimpleNamespace(
            temperature=torch.ones(batch_size), all_greedy=False, all_random=True, generators={}
        )

    def given(self) -> tuple[Any, ...]:
        return self.drafts, self.counts, self.k, self.ends

    def coupled(self) -> torch.Tensor:
        bonus = verify.keyed_sample(self.bonus_logits, self.keys, self.positions + self.k)
        return verify.coupled_sample(
            *self.given(), self.logits, bonus.unsqueeze(-1), self.metadata, self.keys, self.positions
        )

    def standard(self) -> torch.Tensor:
        bonus = compiled_random_sample(self.bonus_logits).unsqueeze(-1)
        return verify.rejection_sample(*self.given(), None, self.logits, bonus, self.metadata)

    def vllm(self) -> torch.Tensor:
        bonus = compiled_random_sample(self.bonus_logits).unsqueeze(-1)
        return rejection_sampler.rejection_sample(*self.given(), None, self.logits, bonus, self.metadata)

    def ascend(self, published: types.SimpleNamespace) -> torch.Tensor:
        bonus = random_sample(self.bonus_logits.softmax(dim=-1), {}).unsqueeze(-1)
        temperature = published.expand_batch_to_tokens(
            self.metadata.temperature, self.ends, len(self.drafts), replace_from=-1, replace_to=1
        )
        probs = self.logits.div_(temperature.unsqueeze(-1)).softmax(dim=-1)
        return published.rejection_sample(*self.given(), None, probs, bonus, self.metadata)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The least of several runs, after one to warm up; slow calls are run twice only."""
    best = float("inf")
    for number in range(repeats + 1):
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        best = min(best, took) if number else best
        if number and took > 1:
            break
    return best


def same_tokens(published: types.SimpleNamespace) -> bool:
    """Whether `verify.rejection_sample`, vLLM's and vllm-ascend's give the same tokens for the same seed."""
    step = Step(64, 8, 1000)
    bonus = torch.arange(64, dtype=torch.int32).unsqueeze(-1)
    outputs = []
    for function, weights in (
        (verify.rejection_sample, step.logits),
        (rejection_sampler.rejection_sample, step.logits),
        (published.rejection_sample, step.logits.softmax(dim=-1)),
    ):
        torch.manual_seed(1)
        outputs.append(function(*step.given(), None, weights, bonus, step.metadata))
    return torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def measure(published: types.SimpleNamespace | None, repeats: int, batch_sizes: list[int]) -> dict[str, Any]:
    cells = []
    for vocab_size in VOCAB_SIZES:
        for batch_size in batch_sizes:
            for k in NUMS_SPECULATIVE_TOKENS:
                step = Step(batch_size, k, vocab_size)
                calls: dict[str, Callable[[], Any]] = {
                    "coupled": step.coupled,
                    "standard": step.standard,
                    "vllm": step.vllm,
                }
                if published is not None:
                    calls["vllm-ascend"] = lambda step=step: step.ascend(published)
                times = {name: 1e3 * seconds(call, repeats) for name, call in calls.items()}
                cells.append({"vocab_size": vocab_size, "batch_size": batch_size, "k": k, "ms": times})
                ratios = {name: f"{value / times['coupled']:.1f}x" for name, value in times.items()}
                print(vocab_size, batch_size, k, f"coupled {times['coupled']:.2f} ms", ratios, flush=True)
    return {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "targets": TARGETS,
        "same_tokens_for_the_same_seed": same_tokens(published) if published else None,
        "cells": cells,
    }


def share_of_decode_steps(model: str) -> dict[str, float]:
    """The share of an engine's time that goes into drawing tokens, 16 drafting rows of the demo's policy."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from rollout_spec.demo.data import make_rows

    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512,
        enforce_eager=True, kv_cache_memory_bytes=1 << 28,
        speculative_config={
            "method": "custom_class",
            "model": "rollout_spec.vllm_proposer.SuffixProposer",
            "num_speculative_tokens": 4,
        },
        additional_config={"rollout_spec": {"batch_threshold": 16}},
    )  # fmt: skip
    spent = {"verification": 0.0, "depth": 0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            spent["depth"] += 1
            result = function(*args)
            spent["depth"] -= 1
            if not spent["depth"]:  # one of them calls the other
                spent["verification"] += time.perf_counter() - start
            return result

        return call

    messages = [row["prompt"] for row in make_rows(2, 0, "bench") for _ in range(8)]
    params = SamplingParams(temperature=0.7, max_tokens=96, ignore_eos=True)
    llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)  # the prompts, for the prefix cache
    verify.coupled_sample, verify.keyed_sample = timed(verify.coupled_sample), timed(verify.keyed_sample)
    start = time.perf_counter()
    llm.chat(messages, params, use_tqdm=False)
    total = time.perf_counter() - start
    llm.llm_engine.engine_core.shutdown()
    return {
        "seconds": total,
        "verification_seconds": spent["verification"],
        "share": spent["verification"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--vllm-ascend", type=Path, metavar="FILE", help="vllm_ascend/sample/rejection_sampler.py"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES), metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--model", metavar="DIR", help="also the share of an engine's decode steps")
    args = parser.parse_args()
    use_cpu_kernels()
    published = published_functions(args.vllm_ascend) if args.vllm_ascend else None
    record = measure(published, args.repeats, args.batch_sizes)
    if args.model:
        record["decode_steps"] = share_of_decode_steps(args.model)
        print(record["decode_steps"])
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
