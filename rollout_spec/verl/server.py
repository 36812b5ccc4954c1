"""verl's vLLM rollout server and replica, measuring their rollouts and feeding the drafter's groups."""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logger import init_logger

from rollout_spec import trace
from rollout_spec.config import SpecConfig
from rollout_spec.metrics import EngineCounters, RequestCounters, RolloutReport
from rollout_spec.verl.homes import Homes
from rollout_spec.verl.hydra_plugin import config_file
from rollout_spec.verl.ranks import RankedEngine
from rollout_spec.verl.windows import Windows, is_validation
from rollout_spec.vllm import OPTIONS_KEY
from rollout_spec.vllm.cores import EngineCores
from rollout_spec.vllm.keys import GROUP_KEY, KEY, TURN_TOKENS_KEY
from rollout_spec.vllm.plugin import TAKE_ABORTED
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.scheduler import CORE_KEY, COUNTERS_KEY, UNCOUNTED_KEY

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
        """What the drafter's method returns; None where there is no drafter, or its drafts are not used."""
        drafter = getattr(getattr(self, "model_runner", None), "drafter", None)
        if not isinstance(drafter, SuffixProposer) or not drafter.is_used:
            return None
        result = getattr(drafter, method)(*args)
        return result.to_dict() if isinstance(result, EngineCounters) else result


class SpecHttpServer(vLLMHttpServer):
    """verl's rollout server. Generation is upstream's; around it the rollout is measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = requested_spec(self.config)
        assert spec is not None, "SpecReplica starts this server only where rollout.spec is used"
        self._spec = spec
        self._windows = Windows()
        self._decoded_cores = set[int]()  # engine cores, since their drafters' counters were taken
        self._defect: str | None = None  # of an engine core's drafter
        self._num_unnamed = 0
        # Requests that have ended since the engine got such names last.
        self._aborted_ids, self._finished_ids = list[str](), list[str]()
        # What other servers are to have, once one has asked for it, and what this one is to take in.
        self._is_sharing, self._shared, self._received = False, list[bytes](), list[bytes]()
        directory = os.environ.get(trace.DIR_VARIABLE)
        self._trace = TraceWriter(pathlib.Path(directory), self.replica_rank) if directory else None

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine: Any = ranked(self.engine, self._spec)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        extra_args = dict(sampling_params.get("extra_args") or {})
        if self._spec.coupled and KEY not in extra_args:
            extra_args[KEY] = self._name_unnamed()
        is_training = not is_validation(extra_args.get(KEY))
        if not is_training:
            extra_args[UNCOUNTED_KEY] = True
        if extra_args:
            sampling_params = {**sampling_params, "extra_args": extra_args}
        with self._windows.request(is_training) as request:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        counters, core = _take_counters(output)
        if counters is not None and counters.num_decode_steps:
            self._decoded_cores.add(core)
        self._windows.count(request, len(output.token_ids), counters, output.stop_reason or "")
        is_aborted = output.stop_reason == "aborted"
        if self._spec.enabled:
            (self._aborted_ids if is_aborted else self._finished_ids).append(request_id)
        if self._trace is not None and not is_aborted:
            self._trace.add(prompt_ids, output.token_ids, extra_args)
        return output

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        """Verl's gate, where a request waits for a weight sync."""
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._windows.admit()
        return rejected

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

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The beginning of a weight sync; not with `abort_only`, which verl has after 0.9.1."""
        result = await super().abort_all_requests(*args, **kwargs)
        if self.node_rank == 0 and not kwargs.get("abort_only"):
            if not await self._windows.wait_until_quiet():
                logger.warning("rollout_spec: aborted requests go on: they count towards the next weights")
            await self._end_window()
        return result

    async def set_global_steps(self, global_steps: int) -> None:
        """The end of a weight sync: what has been indexed so far is of an older policy."""
        if self.node_rank == 0:
            await self._end_window()
        await super().set_global_steps(global_steps)
        if self._spec.enabled and self.node_rank == 0:
            aborted, _ = self._take_ended()
            await self._call("end_step", aborted)

    async def end_validation(self) -> None:
        """What a validation that had the engine to itself has counted there is no part of the training."""
        self._flush_trace()
        if self._spec.enabled and not self._windows.has_training:
            await self._take_engine_counters()

    async def _end_window(self) -> None:
        """No request is in flight, and the weights may change: a time to count, and to hand on texts."""
        if self._windows.is_untouched:
            return
        engine, aborted = None, RequestCounters()
        if self._spec.enabled:
            engine = await self._take_engine_counters()
            for counts in await EngineCores(self.engine).call_all(TAKE_ABORTED):
                aborted.add(RequestCounters(**(counts or {})))
        self._windows.end(self.global_steps, engine, aborted)
        self._flush_trace()
        if self._is_sharing:
            await self._exchange()

    async def _take_engine_counters(self) -> EngineCounters | None:
        """The sums over the engine cores; None where none has a drafter."""
        total: EngineCounters | None = None
        decoded, self._decoded_cores = self._decoded_cores, set()
        for core, counts in enumerate(await self._call("take_counters")):
            self._check_drafter(core, counts, core in decoded)
            if counts is not None:
                total = total or EngineCounters()
                total.add(EngineCounters(**counts))
        return total

    def _check_drafter(self, core: int, counts: dict[str, Any] | None, has_decoded: bool) -> None:
        """A defect ends the run with its next report: a weight sync is no place to fail."""
        if counts is None:
            self._defect = f"engine core {core} of replica {self.replica_rank} has no drafter of rollout_spec"
        elif has_decoded and counts["num_steps"] + counts["num_failed_steps"] == 0:
            self._defect = (
                f"engine core {core} of replica {self.replica_rank} decoded without calling its drafter"
            )

    def _flush_trace(self) -> None:
        if self._trace is not None:
            self._trace.flush(self.global_steps)

    async def take_history(self) -> list[bytes]:
        """The responses that this replica has served, each once, as its history keeps them.

        While requests are in flight, those up to the last weight sync.
        """
        self._is_sharing = True
        if self._windows.is_quiet:
            await self._exchange()
        taken, self._shared = self._shared, []
        return taken

    async def add_history(self, *contents: Sequence[bytes]) -> None:
        """Add what other replicas' `take_history` returned, or what is in the file of a checkpoint.

        While requests are in flight the engine does not wait for that: it is done at the next weight sync.
        """
        self._received += chain.from_iterable(contents)
        if self._windows.is_quiet:
            await self._add_received()

    async def pack_history(self) -> bytes | None:
        """The whole history of this replica, for a file; None where its drafter is off."""
        await self._add_received()
        packed = await self._call("pack_history", *self._take_ended())
        return next(iter(_kept(packed)), None)  # all engine cores have the same

    async def _exchange(self) -> None:
        """Hand on what every engine core has served: to the others at once, to other servers when asked."""
        taken = await self._call("take_history", *self._take_ended())
        self._shared += _kept(taken)
        if len(taken) > 1:
            others = [_kept(taken[:core] + taken[core + 1 :]) for core in range(len(taken))]
            await self._call_each("add_history", [(texts,) for texts in others])
        await self._add_received()

    async def _add_received(self) -> None:
        if self._received:
            received, self._received = self._received, []
            await self._call("add_history", received)

    def _take_ended(self) -> tuple[list[str], list[str]]:
        """The aborted and the finished requests: the drafter cannot tell them from those that run on."""
        aborted, finished = self._aborted_ids, self._finished_ids
        self._aborted_ids, self._finished_ids = [], []
        return aborted, finished

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """What the drafter's method returns in each engine core; None where no worker has a drafter."""
        return await self._call_each(method, [args] * len(EngineCores(self.engine)))

    async def _call_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same, with the arguments of each engine core."""
        cores = EngineCores(self.engine)
        calls = (cores.call_workers(core, "rollout_spec_call", method, *own) for core, own in enumerate(args))
        return [next(iter(_kept(answers)), None) for answers in await asyncio.gather(*calls)]

    async def take_rollout_report(self) -> RolloutReport:
        """What was served under the weights that were replaced since the last call.

        Raises:
            RuntimeError: drafting was asked for, and the engine has no drafter or decoded without it.
        """
        if self._defect is not None:
            asked = f"rollout.spec={self._spec.method} was asked for"
            raise RuntimeError(f"{asked}, but {self._defect}; run `rollout-spec doctor`")
        return self._windows.take()

    def _get_worker_extension_cls(self) -> str:
        return f"{__name__}.{SpecWorkerExtension.__name__}"


def ranked(engine: Any, spec: SpecConfig) -> Any:
    """The engine, which sends siblings to one of its data-parallel ranks where `routing` asks for it."""
    num_ranks = len(EngineCores(engine))
    if spec.routing != "group" or num_ranks == 1:
        return engine
    router = OmegaConf.load(config_file("rollout_spec_router/group.yaml"))
    return RankedEngine(engine, num_ranks, Homes(router.max_imbalance))


def _kept(contents: Sequence[Any]) -> list[Any]:
    return [content for content in contents if content is not None]


def _take_counters(output: TokenOutput) -> tuple[RequestCounters | None, int]:
    """The scheduler's counts and engine core, which go no further than this; None where it gave none."""
    params = output.extra_fields.pop("kv_transfer_params", None) or {}
    counts, core = params.pop(COUNTERS_KEY, None), params.pop(CORE_KEY, 0)
    if params:
        output.extra_fields["kv_transfer_params"] = params
    if counts is None:
        return None, core
    counters = RequestCounters(**counts)
    # verl's own names for the same, which it fills for MTP rollouts
    output.extra_fields["spec_num_draft_tokens"] = counters.num_draft_tokens
    output.extra_fields["spec_num_accepted_tokens"] = counters.num_accepted_tokens
    output.extra_fields["spec_num_verify_steps"] = counters.num_drafts
    return counters, core


class TraceWriter:
    """Records rollouts as JSON lines, one prompt and its responses a line, for `rollout-spec replay`."""

    def __init__(self, directory: pathlib.Path, replica_rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = trace.trace_file(directory, replica_rank)
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
        lines = (
            trace.to_line(group, step, prompt, *zip(*samples, strict=True))
            for (group, prompt), samples in self._responses.items()
        )
        trace.append_lines(self._file, lines)
        self._responses.clear()
