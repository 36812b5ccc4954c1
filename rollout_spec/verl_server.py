"""verl's vLLM rollout server and replica, measuring their rollouts and feeding the drafter's groups."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logger import init_logger

from rollout_spec.config import SpecConfig
from rollout_spec.metrics import EngineCounters, RequestCounters, RolloutReport
from rollout_spec.vllm_proposer import GROUP_KEY, OPTIONS_KEY, SuffixProposer
from rollout_spec.vllm_sampler import KEY
from rollout_spec.vllm_scheduler import ABORTED_KEY, COUNTERS_KEY

TRACE_DIR_VARIABLE = "ROLLOUT_SPEC_TRACE_DIR"
MAX_FIRST_TURNS = 4096

logger = init_logger(f"vllm.{__name__}")


def requested_spec(rollout_config: Any) -> SpecConfig | None:
    """The options that `rollout.spec` put into the engine's arguments; None where it is not used."""
    engine_kwargs = (rollout_config.get("engine_kwargs") or {}).get("vllm") or {}
    options = (engine_kwargs.get("additional_config") or {}).get(OPTIONS_KEY)
    return None if options is None else SpecConfig.from_mapping(dict(options))


class SpecReplica(vLLMReplica):
    """verl's replica; where `rollout.spec` is used, its servers are `SpecHttpServer`s."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, *args, **kwargs)
        if requested_spec(config) is not None and not self.is_reward_model and not self.is_teacher_model:
            self.server_class = ray.remote(SpecHttpServer)


class SpecWorkerExtension(vLLMColocateWorkerExtension):
    """What the server asks of the engine's workers."""

    def rollout_spec_take_counters(self) -> dict[str, Any] | None:
        proposer = self._rollout_spec_proposer()
        return None if proposer is None else proposer.take_counters().to_dict()

    def rollout_spec_end_step(self) -> None:
        proposer = self._rollout_spec_proposer()
        if proposer is not None:
            proposer.end_step()

    def rollout_spec_take_history(self) -> bytes | None:
        proposer = self._rollout_spec_proposer()
        # Every tensor-parallel rank has the same history; one of them hands it out.
        taken = None if proposer is None else proposer.take_history()
        return taken if self.rank == 0 else None

    def rollout_spec_pack_history(self) -> bytes | None:
        proposer = self._rollout_spec_proposer()
        return proposer.pack_history() if proposer is not None and self.rank == 0 else None

    def rollout_spec_add_history(self, contents: Sequence[bytes]) -> None:
        proposer = self._rollout_spec_proposer()
        if proposer is not None:
            proposer.add_history(contents)

    def _rollout_spec_proposer(self) -> SuffixProposer | None:
        proposer = getattr(getattr(self, "model_runner", None), "drafter", None)
        return proposer if isinstance(proposer, SuffixProposer) else None


class SpecHttpServer(vLLMHttpServer):
    """verl's rollout server. Generation is upstream's; around it the rollout is measured and grouped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = requested_spec(self.config)
        assert spec is not None, "SpecReplica starts this server only where rollout.spec is used"
        self._spec = spec
        self._first_turns = FirstTurns()
        self._busy = BusyClock()
        self._requests: list[RequestCounters] = []
        self._aborted = RequestCounters()
        self._num_generated_tokens = 0
        self._num_unnamed = 0
        directory = os.environ.get(TRACE_DIR_VARIABLE)
        self._trace = TraceWriter(pathlib.Path(directory), self.replica_rank) if directory else None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        extra_args = dict(sampling_params.get("extra_args") or {})
        if self._spec.enabled and self._spec.group_sharing:
            extra_args.setdefault(GROUP_KEY, self._first_turns.group(prompt_ids))
        if self._spec.coupled and KEY not in extra_args:
            extra_args[KEY] = self._name_unnamed(prompt_ids)
        if extra_args:
            sampling_params = {**sampling_params, "extra_args": extra_args}
        with self._busy.request():
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        self._num_generated_tokens += len(output.token_ids)
        self._take_request_counters(output)
        if self._trace is not None and output.token_ids:
            group = self._first_turns.group(prompt_ids)
            self._trace.add(prompt_ids, output.token_ids, group, extra_args.get(KEY))
        return output

    def _name_unnamed(self, prompt_ids: Sequence[int]) -> list[Any]:
        """For a request that did not come from verl's agent loops: no two of them share their noise."""
        self._num_unnamed += 1
        if self._num_unnamed == 1:
            logger.warning(
                "rollout_spec: a request does not say whose it is (extra_args[%r]), so its noise depends on "
                "the replica and the order of arrival: other runs have other tokens. This is said once.",
                KEY,
            )
        group = self._first_turns.group(prompt_ids)
        return ["unnamed", self.config.seed, self.replica_rank, self.global_steps, group, self._num_unnamed]

    async def set_global_steps(self, global_steps: int) -> None:
        """The end of a weight sync: what has been indexed so far is of an older policy."""
        await super().set_global_steps(global_steps)
        if self._spec.enabled and self.node_rank == 0:
            await self.engine.collective_rpc("rollout_spec_end_step")

    async def take_history(self) -> bytes | None:
        """The responses that this replica has served since the last call, as its history keeps them.

        None where its drafter is off. To be called while no request is in flight.
        """
        return await self._history("rollout_spec_take_history")

    async def pack_history(self) -> bytes | None:
        """The whole history of this replica, for a file; None where its drafter is off."""
        return await self._history("rollout_spec_pack_history")

    async def _history(self, method: str) -> bytes | None:
        per_worker = await self.engine.collective_rpc(method)
        return next((content for content in per_worker if content is not None), None)

    async def add_history(self, *contents: bytes | None) -> None:
        """What other replicas' `take_history`, or anybody's `pack_history`, gave."""
        served = [content for content in contents if content is not None]
        await self.engine.collective_rpc("rollout_spec_add_history", args=(served,))

    async def take_rollout_report(self) -> RolloutReport:
        """What was served since the last call.

        Raises:
            RuntimeError: drafting was asked for, tokens were decoded, and the drafter was never called.
        """
        engine = await self._take_engine_counters() if self._spec.enabled else None
        report = RolloutReport(
            engine, self._requests, self._num_generated_tokens, self._busy.take_seconds(), self._aborted
        )
        self._requests, self._num_generated_tokens, self._aborted = [], 0, RequestCounters()
        if self._trace is not None:
            self._trace.flush(self.global_steps)
        was_called = engine is None or engine.num_steps + engine.num_failed_steps > 0
        if not was_called and any(request.num_decode_steps for request in report.requests):
            raise RuntimeError(
                f"rollout.spec={self._spec.method} was asked for, but the engine of replica "
                f"{self.replica_rank} decoded without calling its drafter; run `rollout-spec doctor`"
            )
        return report

    async def _take_engine_counters(self) -> EngineCounters:
        # Every tensor-parallel rank drafts the same; rank 0's drafts are the ones used.
        per_worker = await self.engine.collective_rpc("rollout_spec_take_counters")
        counters = next((worker for worker in per_worker if worker is not None), None)
        if counters is None:
            raise RuntimeError(
                f"rollout.spec={self._spec.method} was asked for, but the engine of replica "
                f"{self.replica_rank} has no drafter of rollout_spec; run `rollout-spec doctor`"
            )
        return EngineCounters(**counters)

    def _take_request_counters(self, output: TokenOutput) -> None:
        params = output.extra_fields.pop("kv_transfer_params", None) or {}
        counts = params.pop(COUNTERS_KEY, None)
        self._aborted.add(RequestCounters(**params.pop(ABORTED_KEY, {})))
        if params:
            output.extra_fields["kv_transfer_params"] = params
        if counts is None:
            return
        counters = RequestCounters(**counts)
        self._requests.append(counters)
        # verl's own names for the same, which it fills for MTP rollouts
        output.extra_fields["spec_num_draft_tokens"] = counters.num_draft_tokens
        output.extra_fields["spec_num_accepted_tokens"] = counters.num_accepted_tokens
        output.extra_fields["spec_num_verify_steps"] = counters.num_drafts

    def _get_worker_extension_cls(self) -> str:
        return f"{__name__}.{SpecWorkerExtension.__name__}"


class FirstTurns:
    """Names the group of a request by its trajectory's first prompt.

    Samples of one prompt share it token for token. The prompt of a later turn, or of a request that goes on
    after an abort, begins with the first one: the known first prompt that is a prefix of it names its group.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, str] = OrderedDict()
        self._num_by_length: dict[int, int] = defaultdict(int)

    def group(self, prompt_ids: Sequence[int]) -> str:
        prompt = np.asarray(prompt_ids, np.int32).tobytes()
        # Most requests are first turns: their whole prompt is known from a sibling, or is new.
        for length in (len(prompt), *sorted(self._num_by_length)):
            known = self._groups.get(prompt[:length]) if length <= len(prompt) else None
            if known is not None:
                self._groups.move_to_end(prompt[:length])
                return known
        name = hashlib.sha256(prompt).hexdigest()[:16]
        self._groups[prompt] = name
        self._num_by_length[len(prompt)] += 1
        if len(self._groups) > MAX_FIRST_TURNS:
            oldest, _ = self._groups.popitem(last=False)
            self._forget_length(len(oldest))
        return name

    def _forget_length(self, length: int) -> None:
        self._num_by_length[length] -= 1
        if not self._num_by_length[length]:
            del self._num_by_length[length]


class BusyClock:
    """Wall time during which at least one request was in flight, in seconds."""

    def __init__(self) -> None:
        self._num_in_flight = 0
        self._since = 0.0
        self._seconds = 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        if not self._num_in_flight:
            self._since = time.perf_counter()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._seconds += time.perf_counter() - self._since

    def take_seconds(self) -> float:
        """The time since the last call; a request in flight goes on counting towards the next."""
        now = time.perf_counter()
        if self._num_in_flight:
            self._seconds += now - self._since
            self._since = now
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class TraceWriter:
    """Records rollouts as JSON lines, one prompt and its responses a line, for `rollout-spec replay`."""

    def __init__(self, directory: pathlib.Path, replica_rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rollouts-{replica_rank}.jsonl"
        self._responses: dict[tuple[int, ...], list[tuple[list[int], Any]]] = defaultdict(list)
        self._groups: dict[tuple[int, ...], str] = {}

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], group: str, name: Any = None) -> None:
        """Record a response.

        Args:
            group: the same for the prompts of all turns.
            name: the sample's own; it tells it from its siblings in another run as well.
        """
        prompt = tuple(prompt_ids)
        self._groups[prompt] = group
        self._responses[prompt].append((list(token_ids), name))

    def flush(self, step: int | None) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for prompt, responses in self._responses.items():
                line: Mapping[str, Any] = {
                    "group": self._groups[prompt],
                    "step": step,
                    "prompt_token_ids": prompt,
                    "responses": [response for response, _ in responses],
                    "names": [name for _, name in responses],
                }
                file.write(json.dumps(line) + "\n")
        self._responses.clear()
        self._groups.clear()
