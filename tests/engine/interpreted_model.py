"""Run as a program, as `interpreted_runner`: a model drafts on V2, alone and beside the suffix drafts."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import tests.engine.interpreted_triton  # noqa: F401 (before all others)
from rollout_spec.vllm.features import version
from tests.engine.conftest import close, engine_settings
from tests.engine.interpreted_runner import given

NUM_MODEL_TOKENS = 3
PROMPTS = [[1, *[5, 9] * 5, 7 + i] for i in range(4)]
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)


def main(models: str, output: str) -> None:
    folders = {path.name: str(path) for path in pathlib.Path(models).iterdir()}
    target, eagle = folders["target"], {"method": "eagle", "model": folders["eagle"]}
    same = target, {"method": "draft_model", "model": folders["copy"]}
    if version() != "0.32.0":  # the first whose V2 has draft models
        same = folders["bigrams"], {"method": "eagle", "model": folders["bigrams-eagle"]}
    result = {"plain": run(target, None), "model": run(target, eagle), "same": run(*same)}
    pathlib.Path(output).write_text(json.dumps(result))


def run(model: str, drafter: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """What an engine gives with coupled verification.

    Args:
        model: its folder.
        drafter: of vLLM's `speculative_config`; None for an engine without.
        arguments: vLLM's.
    """
    from vllm import LLM

    settings = engine_settings(model) | {"max_model_len": 128, "max_num_seqs": 4, "disable_log_stats": False}
    settings["additional_config"] = {"rollout_spec": {"method": "off"}}
    if drafter is not None:
        settings["speculative_config"] = drafter | {"num_speculative_tokens": NUM_MODEL_TOKENS}
    llm = LLM(**settings | arguments)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__ == "vllm.v1.worker.cpu.model_runner", type(runner)
    found = {"requests": serve(llm), "counted": counted(llm)}
    close([llm])
    return found


def serve(llm: Any) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=1,
            extra_args={"rollout_spec_key": ["model", row]},
        )
        for row, temperature in enumerate(TEMPERATURES)
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [given(output) for output in outputs]


def counted(llm: Any) -> dict[str, Any]:
    """vLLM's own counts of drafts and accepted tokens."""
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_")
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
