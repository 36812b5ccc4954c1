"""Two tensor-parallel ranks on vLLM's MRV2, on the CPU, with drafts and without."""

from __future__ import annotations

from typing import Any

from tests.engine.conftest import OFF, close, engine_settings
from tests.engine.interpreted_runner import LATE, serve_named

NAMES = ("unnamed", "greedy", "sampled", "top_k", *LATE)


class Extension:
    def note_drafts(self) -> None:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        fill, self.drafts = runner.update_requests, list[dict[str, list[int]]]()

        def fill_and_note(output: Any) -> None:
            fill(output)
            self.drafts.append(dict(output.scheduled_spec_decode_tokens))

        runner.update_requests = fill_and_note

    def noted(self) -> tuple[list[dict[str, list[int]]], int]:
        drafter = self.model_runner.drafter  # type: ignore[attr-defined]
        return self.drafts, drafter.take_counters().num_failed_steps


def served(model: str, spec: dict[str, Any] | None) -> dict[str, Any]:
    from vllm import LLM

    settings = engine_settings(model, spec) | ({} if spec is not None else OFF)
    sizes = {"max_model_len": 256, "max_logprobs": -1, "skip_tokenizer_init": False}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "async_scheduling": True}
    extension = "tests.engine.interpreted_tensor_parallel.Extension"
    llm = LLM(**settings | sizes | ranks | {"worker_extension_cls": extension})
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    if spec is not None:
        llm.collective_rpc("note_drafts")
    found = {"requests": serve_named(llm, NAMES)}
    if spec is not None:
        found["ranks"] = llm.collective_rpc("noted")
    close([llm])
    return found


def main(model: str) -> dict[str, Any]:
    return {name: served(model, spec) for name, spec in (("plain", None), ("drafted", {}))}
