"""vllm-ascend's own model runner on a CPU: its batch, samplers, bookkeeping and drafts, and no forward pass.

A step's logits come from a table that looks at the last token, so there is nothing to compute on a device.
What a scheduler would say of a step is said here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm_ascend.worker.model_runner_v1 import ExecuteModelState, NPUModelRunner

from rollout_spec.vllm import OPTIONS_KEY, plugin, speculative_config

K, VOCAB_SIZE, MAX_LEN = 4, 128, 256
ALONE = SimpleNamespace(
    world_size=1, rank_in_group=0, rank=0, is_first_rank=True, is_last_rank=True, device_group=None
)


def make_config(model: Path, spec: dict[str, Any] | None, **arguments: Any) -> VllmConfig:
    """An engine's, drafting where `spec` holds options; of the method `off`, without drafts."""
    settings: dict[str, Any] = {"additional_config": arguments.pop("additional_config", {})}
    if spec is not None:
        settings["additional_config"][OPTIONS_KEY] = {"history": 0, "batch_threshold": 64, **spec}
        if spec.get("method") != "off":
            settings["speculative_config"] = speculative_config(spec.get("num_speculative_tokens", K))
    if not (model / "config.json").exists():
        import transformers

        transformers.Qwen2Config(
            architectures=["Qwen2ForCausalLM"], vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64,
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            max_position_embeddings=MAX_LEN,
        ).save_pretrained(model)  # fmt: skip
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_num_seqs=16, max_model_len=MAX_LEN,
        **settings | {"enforce_eager": True} | arguments,
    ).create_engine_config()  # fmt: skip


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process, without a distributed environment."""
    names = ("_PP", "_TP", "_DCP", "_PCP")
    before = {name: getattr(parallel_state, name) for name in names}
    for name in names:
        setattr(parallel_state, name, ALONE)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def make_runner(config: VllmConfig) -> Any:
    """vllm-ascend's model runner V1, connected with our drafter and samplers as a worker's is."""
    with set_current_vllm_config(config):
        runner = NPUModelRunner(config, torch.device("cpu"))
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[])  # no memory for a forward pass
    plugin._bind(SimpleNamespace(vllm_config=config, model_runner=runner))
    if runner.drafter is not None:
        runner.drafter.load_model(None)
    return runner


@dataclasses.dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    num_computed: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    draft: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Engine:
    """Requests, each a row from its first step on."""

    def __init__(self, runner: Any, logits: torch.Tensor) -> None:
        self.runner, self._logits = runner, logits
        self.requests: dict[str, Request] = {}
        self._finished: set[str] = set()
        self.num_accepted = 0
        self.lengths: list[int] = []  # of the drafts of every row and step

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": 60, "extra_args": {"rollout_spec_key": name}} | params)
        self.requests[name] = Request(list(prompt), sampling)

    def run(self) -> dict[str, list[int]]:
        """The tokens of all requests, each to its `max_tokens`."""
        done: dict[str, list[int]] = {}
        while self.requests:
            self.step()
            for name, request in list(self.requests.items()):
                if len(request.output) >= request.params.max_tokens:
                    done[name] = request.output[: request.params.max_tokens]
                    del self.requests[name]
                    self._finished.add(name)
        return done

    def step(self) -> None:
        output, drafts = self._scheduled()
        self.runner._update_states(output)
        names = self.runner.input_batch.req_ids
        rows = [self.requests[name] for name in names]
        chunks = [
            r.tokens[r.num_computed :] + drafts.get(name, []) for name, r in zip(names, rows, strict=True)
        ]
        lengths = np.array([len(chunk) for chunk in chunks], np.int32)
        counts = np.array([len(drafts.get(name, [])) for name in names], np.int32)
        flat = torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int32)
        self.runner.input_ids.gpu[: len(flat)] = flat
        metadata = None
        if drafts:
            metadata = self.runner._calc_spec_decode_metadata(counts, lengths.cumsum(dtype=np.int32), None)
        texts = [r.tokens + drafts.get(name, []) for name, r in zip(names, rows, strict=True)]
        ends = [len(t) - n + i for t, n in zip(texts, counts, strict=True) for i in range(n + 1)]
        owners = [t for t, n in zip(texts, counts, strict=True) for _ in range(n + 1)]
        logits = torch.stack([self._logits[t[e - 1]] for t, e in zip(owners, ends, strict=True)])
        of_states = dict.fromkeys(ExecuteModelState._fields)
        self.runner.execute_model_state = ExecuteModelState(
            **of_states | {
                "scheduler_output": output, "logits": logits, "spec_decode_metadata": metadata,
                "spec_decode_common_attn_metadata": object(), "hidden_states": torch.zeros(len(flat), 1),
            }
        )  # fmt: skip
        sampled = self.runner.sample_tokens(None)
        if isinstance(sampled, AsyncModelRunnerOutput):  # without drafts vLLM schedules ahead
            sampled = sampled.get_output()
        for name, tokens in zip(sampled.req_ids, sampled.sampled_token_ids, strict=True):
            request = self.requests[name]
            self.lengths.append(len(drafts.get(name, [])))
            self.num_accepted += len(tokens) - 1
            request.num_computed = len(request.tokens) + len(tokens) - 1
            request.output += tokens
        proposed = self.runner.take_draft_token_ids()
        if proposed is not None:
            for name, draft in zip(proposed.req_ids, proposed.draft_token_ids, strict=True):
                self.requests[name].draft = list(draft)

    def _scheduled(self) -> tuple[SchedulerOutput, dict[str, list[int]]]:
        known = self.runner.requests
        new = [(name, r) for name, r in self.requests.items() if name not in known]
        old = [(name, r) for name, r in self.requests.items() if name in known]
        drafts = {name: r.draft for name, r in old if r.draft}
        numbers = {
            name: len(r.tokens) - r.num_computed + len(drafts.get(name, ()))
            for name, r in self.requests.items()
        }
        cached = CachedRequestData(
            req_ids=[name for name, _ in old], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=[None] * len(old), num_computed_tokens=[r.num_computed for _, r in old],
            num_output_tokens=[len(r.output) for _, r in old],
        )  # fmt: skip
        finished, self._finished = self._finished, set()
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(name, r.prompt, [], r.params, None, ([],), 0, None) for name, r in new
        ]
        output.scheduled_cached_reqs, output.finished_req_ids = cached, finished
        output.num_scheduled_tokens, output.scheduled_spec_decode_tokens = numbers, drafts
        output.total_num_scheduled_tokens = sum(numbers.values())
        if hasattr(output, "num_spec_tokens_to_schedule"):  # from vLLM 0.24 on; vllm-ascend's ngram reads it
            output.num_spec_tokens_to_schedule = self.runner.num_spec_tokens
        return output, drafts


def coarse_logits(seed: int = 0) -> torch.Tensor:
    """float32 [VOCAB_SIZE, VOCAB_SIZE], of the next token: text repeats itself, and many logits are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator).mul_(4).round_()
