"""verl's vLLM rollout server, measuring and recording its rollouts, and the replica that makes it."""

from collections.abc import Sequence
from typing import Any

import ray
import transfer_queue
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logger import init_logger

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.metrics import RequestCounters, RolloutReport
from rollout_spec.patches import guard_all, guard_parameters, record
from rollout_spec.placement import GroupPlacement
from rollout_spec.sample_names import split_of
from rollout_spec.verl.changes import GROUPED, PRIVATE_METHODS
from rollout_spec.verl.router import RankRouter
from rollout_spec.verl.server_drafters import Drafters
from rollout_spec.verl.server_history import ServerHistory
from rollout_spec.verl.server_recorder import Recorder
from rollout_spec.verl.server_windows import ABORTED_END_S, Windows
from rollout_spec.verl.settings import V1_TRAINER_ONLY
from rollout_spec.verl.worker_extension import SpecWorkerExtension
from rollout_spec.vllm.engine_cores import EngineCores
from rollout_spec.vllm.keys import NAME_KEY, SAMPLE_KEY, read_names
from rollout_spec.vllm.options import MODEL_METHODS, SCHEDULER, asked_options
from rollout_spec.vllm.scheduler import CORE_KEY, COUNTERS_KEY, UNCOUNTED_KEY

MAX_IDLE_SYNCS = 3  # weight syncs without a request, after which a sample is taken to have ended
logger = init_logger(f"vllm.{__name__}")


def guard_overrides() -> None:
    """Raise a PatchError unless verl's server has the private methods that ours overrides."""
    guard_all(PRIVATE_METHODS, (
        (vLLMHttpServer, "_park_until_admitted", ("self", "request_id")),
        (vLLMHttpServer, "_resolve_sleep_level", ("self",)),
        (vLLMHttpServer, "_get_worker_extension_cls", ("self",)),
    ))  # fmt: skip


def requested_spec(rollout_config: Any) -> SpecConfig | None:
    """The options that `rollout.spec` put into the engine's arguments; None where it is not used."""
    options = asked_options(_engine_kwargs(rollout_config).get("additional_config"))
    return None if options is None else SpecConfig.from_mapping(dict(options))


def _engine_kwargs(rollout_config: Any) -> Any:
    return (rollout_config.get("engine_kwargs") or {}).get("vllm") or {}


class SpecHttpServer(vLLMHttpServer):
    """verl's rollout server, which names requests before verl serves them, then counts and records them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        guard_overrides()  # of this node's verl
        super().__init__(*args, **kwargs)
        spec = requested_spec(self.config)
        assert spec is not None, "SpecReplica starts this server only where rollout.spec is used"
        self._spec = spec
        self._windows = Windows()
        self._drafters = Drafters(lambda: self.engine, self.replica_rank)
        self._history = ServerHistory(self._drafters, lambda: self._windows.is_quiet)
        self._recorder = Recorder(self.replica_rank)
        self._num_idle_syncs = dict[str, int]()  # of the samples whose end nobody has told
        self._num_unnamed = 0
        self._has_said_unknown = False
        self._is_validating = False  # the trainer does, and so does a request of which nobody knows the kind
        self._failure: Exception | None = None  # of a worker, for which a sender of weights would wait
        self._counts_requests = _engine_kwargs(self.config).get("scheduler_cls") == SCHEDULER
        self._warned_missing_spec_decode_stats = self._counts_requests  # so that verl does not: we have them

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        spread_groups(self.engine, self._spec)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().collective_rpc(*args, **kwargs)
        except Exception as error:
            self._failure = error
            raise

    async def raise_if_dead(self) -> None:
        """Raise what the engine of this server has died of, or what one of its workers has failed with."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self.node_rank == 0 and self.engine.errored:
            raise self.engine.dead_error

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        extra_args = self._named(sampling_params)
        is_training = UNCOUNTED_KEY not in extra_args
        if extra_args:
            sampling_params = {**sampling_params, "extra_args": extra_args}
        with self._windows.request(is_training) as request:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        counters, core = _counters_of(output)
        self._windows.count(request, len(output.token_ids), counters, output.stop_reason or "")
        is_aborted, sample = output.stop_reason == "aborted", read_names(extra_args).sample
        if sample is not None:
            self._num_idle_syncs[sample] = 0
        if self._spec.enabled:
            has_decoded = bool(counters and counters.num_decode_steps)
            self._drafters.end_request(request_id, is_aborted, core, has_decoded)
        if is_training and not is_aborted:
            self._recorder.add(prompt_ids, output.token_ids, extra_args)
        return output

    def _named(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """A request's `extra_args`, with a name if its noise needs one, and UNCOUNTED_KEY if it validates."""
        extra_args = dict(sampling_params.get("extra_args") or {})
        sample = extra_args.get(SAMPLE_KEY)
        split = split_of(sample)
        if self._spec.keyed and extra_args.get(NAME_KEY) is None and sampling_params.get("seed") is None:
            extra_args[NAME_KEY] = self._name_unnamed() if split is None else sample
        if split is None and not self._has_said_unknown:
            self._say_unknown_rows()
        if self._is_validating if split is None else split == "val":
            extra_args[UNCOUNTED_KEY] = True
        return extra_args

    async def end_sample(self, sample: str) -> None:
        """The agent loop of the sample of this name has ended."""
        self._num_idle_syncs.pop(sample, None)
        self._recorder.end(sample)
        if self._spec.enabled:
            self._drafters.end_sample(sample)

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        """Where verl lets a request wait for a weight sync."""
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._windows.admit()
        return rejected

    def _name_unnamed(self) -> list[Any]:
        """A name for a request of nobody's agent loop, so that no two of them share their noise."""
        self._num_unnamed += 1
        if self._num_unnamed == 1:
            missing = f"a request has neither a name (extra_args[{NAME_KEY!r}]) nor a seed"
            logger.warning("rollout_spec: %s, so its tokens depend on when and where it arrives", missing)
        return ["unnamed", self.config.seed, self.replica_rank, self.global_steps, self._num_unnamed]

    def _say_unknown_rows(self) -> None:
        self._has_said_unknown = True
        logger.warning(
            "rollout_spec: the agent loop manager does not say of which rows its requests are, so samples "
            "are named by their first prompts: a repeated run has the same set of them; in asynchronous "
            "modes, what is served while a validation runs counts as validation"
        )

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A weight sync begins; not so with `abort_only`, which verl has after 0.9.1."""
        result = await super().abort_all_requests(*args, **kwargs)
        if self.node_rank == 0 and not kwargs.get("abort_only"):
            if not await self._windows.wait_until_quiet():
                late = "some aborted requests still run; their tokens count in the next step's metrics"
                logger.warning("rollout_spec: after %g s %s", ABORTED_END_S, late)
            await self._end_window()
        return result

    async def set_global_steps(self, global_steps: int) -> None:
        """A weight sync has ended."""
        self._num_idle_syncs = {sample: num + 1 for sample, num in self._num_idle_syncs.items()}
        for sample in [each for each, num in self._num_idle_syncs.items() if num > MAX_IDLE_SYNCS]:
            await self.end_sample(sample)
        if self.node_rank == 0:
            await self._end_window()
        await super().set_global_steps(global_steps)
        if self._spec.enabled and self.node_rank == 0:
            await self._drafters.note_new_weights(global_steps)

    async def _end_window(self) -> None:
        """No request is in flight, and the weights may change: the time to count, and to share texts."""
        if self._windows.is_untouched:
            return
        engine = await self._drafters.take_counters() if self._spec.enabled else None
        aborted = await self._drafters.take_aborted() if self._counts_requests else RequestCounters()
        self._windows.end(engine, aborted)
        self._recorder.flush(self.global_steps)
        await self._history.end_window()

    async def begin_validation(self) -> None:
        """Requests of nobody's name validate from now on."""
        self._is_validating = True

    async def end_validation(self) -> None:
        """Drop what the engine counted in a validation that had it to itself."""
        self._is_validating = False
        if self._spec.enabled and not self._windows.has_training:
            await self._drafters.take_counters()

    async def take_rollout_report(self) -> RolloutReport:
        """What the windows counted that have ended since the last call.

        Raises RuntimeError: drafting was asked for, and the engine has no drafter or decoded without it.
        """
        if self._drafters.defect is not None:
            asked = f"rollout.spec={self._spec.method} was asked for"
            raise RuntimeError(f"{asked}, but {self._drafters.defect}; run `rollout-spec doctor`")
        return self._windows.take()

    async def take_history(self) -> list[bytes]:
        return await self._history.take()

    async def add_history(self, *contents: Sequence[bytes]) -> None:
        await self._history.add(contents)

    async def pack_history(self) -> list[bytes]:
        return await self._history.pack()

    def _resolve_sleep_level(self) -> int:
        """A deeper sleep loses the weights of a drafter of the user's own, and no sync brings them back."""
        drafter = _engine_kwargs(self.config).get("speculative_config") or {}
        return 1 if drafter.get("method") in MODEL_METHODS else super()._resolve_sleep_level()

    def _get_worker_extension_cls(self) -> str:
        return f"{SpecWorkerExtension.__module__}.{SpecWorkerExtension.__name__}"


def spread_groups(engine: Any, spec: SpecConfig) -> None:
    """Let the engine send siblings to one of its data-parallel ranks, if `routing` asks for it."""
    num_ranks = len(EngineCores(engine))
    if spec.routing == "group" and num_ranks > 1:
        # Not by `put_before`: such a class would derive from vLLM's, in a module that verl's router imports.
        guard_ranks(type(engine))
        engine.generate = RankRouter(engine.generate, num_ranks, GroupPlacement(spec.max_imbalance)).generate
        record(GROUPED)


def guard_ranks(engine_class: type) -> None:
    """Raise a PatchError if `spread_groups` does not fit this class of engines."""
    guard_parameters(GROUPED, engine_class, "generate", ("self", "prompt", "sampling_params"))


def _counters_of(output: TokenOutput) -> tuple[RequestCounters | None, int]:
    """The scheduler's counts, taken out of the output (None: it gave none), and the engine core's number."""
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


class SpecReplica(vLLMReplica):
    """verl's replica; where `rollout.spec` is used, its servers are `SpecHttpServer`s."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, *args, **kwargs)
        if requested_spec(config) is not None and not self.is_reward_model and not self.is_teacher_model:
            guard_overrides()  # before the engines start, which takes minutes
            try:
                # Whatever the configuration says: of the trainers only V1 joins it before it makes replicas.
                transfer_queue.get_client()
            except AssertionError:
                way_out = "run verl.trainer.main_ppo with trainer.use_v1=True"
                raise ConfigError(f"this is verl's legacy trainer: {way_out}. {V1_TRAINER_ONLY}") from None
            self.server_class = ray.remote(SpecHttpServer)
            self.has_spec_servers = True
