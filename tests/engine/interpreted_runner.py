"""Run as a program: vLLM's CPU engine with model runner V2, whose kernels Triton's interpreter runs.

Triton's wheel has no backend for CPUs, which vLLM asks for before it takes V2. With TRITON_INTERPRET=1 none
is used. What the engines gave is written as JSON to the file that the second argument names.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from tests.engine.conftest import ENVIRONMENT, close, engine_settings, token_ids  # noqa: E402

os.environ |= ENVIRONMENT

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1, "frequency_penalty": 0.5},
)


def main(model: str, output: str) -> None:
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 64}
    result = {
        "plain": run(model, None),
        "drafted": run(model, {}),
        "ahead": run(model, {"batch_threshold": 2}, async_scheduling=True),
        "preempted": run(model, {"batch_threshold": 3}, async_scheduling=True, **few_blocks),
        "auto": run(model, {"batch_threshold": "auto"}, async_scheduling=True),
        "closed": run(model, {"batch_threshold": 0}, async_scheduling=True),
    }
    pathlib.Path(output).write_text(json.dumps(result))


def run(model: str, spec: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """The tokens that an engine gives, what its drafter counted, and how its steps were scheduled."""
    from vllm import LLM, SamplingParams

    settings = engine_settings(model, spec) | {"max_model_len": 256, "max_num_seqs": 4} | arguments
    if spec is None:
        settings["additional_config"] = {"rollout_spec": {"method": "off"}}
    llm = LLM(**settings)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner", type(runner)
    found: dict[str, Any] = {"steps": noted_steps(core.scheduler)}
    prompts = [{"prompt_token_ids": [1, *[5, 9] * 14, 7 + i // 3]} for i in range(6)]
    params = [
        SamplingParams(
            **KINDS[i % 3], max_tokens=16 + 8 * (i % 3), ignore_eos=True, detokenize=False,
            extra_args={"rollout_spec_key": i} if i < 3 else None,  # the others' keys are of their arrival
        )
        for i in range(6)
    ]  # fmt: skip
    found["tokens"] = token_ids(llm.generate(prompts, params, use_tqdm=False))
    found["query_lens"] = runner.cudagraph_manager.decode_query_len, runner.decode_query_len
    if spec is not None:
        found["counters"] = runner.drafter.take_counters().to_dict()
    close([llm])
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
