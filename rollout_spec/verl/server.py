"""verl's vLLM rollout server and replica, measuring their rollouts and feeding the drafter's groups."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logger import init_logger

from rollout_spec.config import SpecConfig
from rollout_spec.metrics import EngineCounters, RequestCounters, RolloutReport
from rollout_spec.vllm.keys import GROUP_KEY, KEY, TURN_TOKENS_KEY
from rollout_spec.vllm.options import OPTIONS_KEY
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.scheduler import ABORTED_KEY, COUNTERS_KEY

TRACE_DIR_VARIABLE = "ROLLOUT_SPEC_TRACE_DIR"

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
    """The server's way to the drafter of a worker."""

    def rollout_spec_call(self, method: str, *args: Any) -> Any:
        """What the drafter's method returns; None where there is no drafter, and on all ranks but the first.

        Every tensor-parallel rank drafts the same and has the same history, so one of them answers.
        """
        drafter = getattr(getattr(self, "model_runner", None), "drafter", None)
        if not isinstance(drafter, SuffixProposer) or (method == "pack_history" and self.rank != 0):
            return None
        result = getattr(drafter, method)(*args)
        if self.rank != 0:
            return None
        return result.to_dict() if isinstance(result, EngineCounters) else result


class SpecHttpServer(vLLMHttpServer):
    """verl's rollout server. Generation is upstream's; around it the rollout is measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = requested_spec(self.config)
        assert spec is not None, "SpecReplica starts this server only where rollout.spec is used"
        self._spec = spec
        self._busy = BusyClock()
        self._requests: list[RequestCounters] = []
        self._aborted = RequestCounters()
        self._num_generated_tokens = 0
        self._num_unnamed = 0
        self._aborted_ids: list[str] = []  # since the engine's requests ended last
        directory = os.environ.get(TRACE_DIR_VARIABLE)
        self._trace = TraceWriter(pathlib.Path(directory), self.replica_rank) if directory else None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        extra_args = dict(sampling_params.get("extra_args") or {})
        if self._spec.coupled and KEY not in extra_args:
            extra_args[KEY] = self._name_unnamed()
            sampling_params = {**sampling_params, "extra_args": extra_args}
        with self._busy.request():
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        self._num_generated_tokens += len(output.token_ids)
        self._take_request_counters(output)
        if output.stop_reason == "aborted":
            self._aborted_ids.append(request_id)
        elif self._trace is not None:
            self._trace.add(prompt_ids, output.token_ids, extra_args)
        return output

    def _name_unnamed(self) -> list[Any]:
        """For a request that did not come from verl's agent loops: no two of them share their noise."""
        self._num_unnamed += 1
        if self._num_unnamed == 1:
            logger.warning(
                "rollout_spec: a request does not say whose it is (extra_args[%r]), so its noise depends on "
                "the replica and the order of arrival: other runs have other tokens. This is said once.",
                KEY,
            )
        return ["unnamed", self.config.seed, self.replica_rank, self.global_steps, self._num_unnamed]

    async def set_global_steps(self, global_steps: int) -> None:
        """The end of a weight sync: what has been indexed so far is of an older policy."""
        await super().set_global_steps(global_steps)
        if self._spec.enabled and self.node_rank == 0:
            await self._end_requests("end_step")

    async def take_history(self) -> bytes | None:
        """The responses that this replica has served since the last call, as its history keeps them.

        None where its drafter is off. To be called while no request is in flight.
        """
        return await self._end_requests("take_history")

    async def pack_history(self) -> bytes | None:
        """The whole history of this replica, for a file; None where its drafter is off."""
        return await self._end_requests("pack_history")

    async def add_history(self, *contents: bytes | None) -> None:
        """Add what other replicas' `take_history`, or anybody's `pack_history`, returned."""
        await self._call("add_history", [content for content in contents if content is not None])

    async def _end_requests(self, method: str) -> Any:
        """Call a method of the drafter that ends all its requests: it has to know which were aborted."""
        aborted, self._aborted_ids = self._aborted_ids, []
        return await self._call(method, aborted)

    async def _call(self, method: str, *args: Any) -> Any:
        """What the drafter's method returns; None where no worker has a drafter."""
        per_worker = await self.engine.collective_rpc("rollout_spec_call", args=(method, *args))
        return next((result for result in per_worker if result is not None), None)

    async def take_rollout_report(self) -> RolloutReport:
        """What was served since the last call.

        Raises:
            RuntimeError: drafting was asked for, and the engine has no drafter or decoded without it.
        """
        counters = await self._call("take_counters") if self._spec.enabled else None
        engine = None if counters is None else EngineCounters(**counters)
        report = RolloutReport(
            engine, self._requests, self._num_generated_tokens, self._busy.take_seconds(), self._aborted
        )
        self._requests, self._num_generated_tokens, self._aborted = [], 0, RequestCounters()
        if self._trace is not None:
            self._trace.flush(self.global_steps)
        if self._spec.enabled:
            self._check_drafter(report)
        return report

    def _check_drafter(self, report: RolloutReport) -> None:
        engine, has_decoded = report.engine, any(request.num_decode_steps for request in report.requests)
        if engine is None:
            defect = "has no drafter of rollout_spec"
        elif has_decoded and engine.num_steps + engine.num_failed_steps == 0:
            defect = "decoded without calling its drafter"
        else:
            return
        raise RuntimeError(
            f"rollout.spec={self._spec.method} was asked for, but the engine of replica {self.replica_rank} "
            f"{defect}; run `rollout-spec doctor`"
        )

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
        # By group and prompt: each response, and its sample's name.
        self._responses: dict[tuple[str, tuple[int, ...]], list[tuple[list[int], Any]]] = defaultdict(list)

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int], named: Mapping[str, Any]) -> None:
        """Record a response that has come to its end, with what it said before it was interrupted.

        Args:
            prompt_ids: the request's prompt, which holds what the response said before.
            token_ids: what the request gave.
            named: what the request says of itself (`rollout_spec.vllm.keys`).
        """
        num_turn_tokens = named.get(TURN_TOKENS_KEY, len(prompt_ids))
        prompt, before = tuple(prompt_ids[:num_turn_tokens]), list(prompt_ids[num_turn_tokens:])
        response = before + list(token_ids)
        if response:
            group = str(named.get(GROUP_KEY, hash(prompt)))  # without a name it is a group of its own
            self._responses[group, prompt].append((response, named.get(KEY)))

    def flush(self, step: int | None) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for (group, prompt), samples in self._responses.items():
                responses, names = zip(*samples, strict=True)
                line = {
                    "group": group,
                    "step": step,
                    "prompt_token_ids": prompt,
                    "responses": responses,
                    "names": names,
                }
                file.write(json.dumps(line) + "\n")
        self._responses.clear()
