"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process of an engine."""

import contextlib
import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.patches import Patch, PatchError, record, when_imported, wrap
from rollout_spec.vllm import OPTIONS_KEY, PROPOSER
from rollout_spec.vllm.options import asked_options, check_spelling, engine_options, has_our_drafter

_CORE = "vllm.v1.engine.core"
TAKE_ABORTED = "rollout_spec_take_aborted"  # a method of vLLM's EngineCore, for its client's utility calls

_BIND = Patch(
    name="vllm-bind-proposer",
    reason="vLLM hands a custom proposer token arrays without the requests they belong to, so siblings, "
    "finished and preempted requests cannot be told apart",
    upstream="vllm/v1/worker/worker_base.py, WorkerWrapperBase.init_device",
    until="`propose` of a custom_class proposer is given the input batch, as the suffix proposer's is",
)
_CHECK = Patch(
    name="vllm-check-options",
    reason="a custom proposer is built in the engine's process, so a wrong option would only show as "
    "'engine core initialization failed' after a process was launched",
    upstream="vllm/engine/arg_utils.py, EngineArgs.create_engine_config",
    until="vLLM lets a custom proposer validate its configuration",
)
_NUMBER = Patch(
    name="vllm-number-samples",
    reason="vLLM copies `extra_args` to each of a request's n samples: all of them would have one noise key "
    "and come out alike",
    upstream="vllm/v1/engine/parallel_sampling.py, ParentRequest.get_child_info",
    until="vLLM puts a sample's number into its request",
)
_ABORTED = Patch(
    name="vllm-aborted-counts",
    reason="the output of an aborted request carries no counts, and a server's calls reach the workers of an "
    "engine core and not its scheduler: what a weight sync interrupts would not be counted",
    upstream="vllm/v1/engine/core.py, EngineCore",
    until="the output of an aborted request has kv_transfer_params",
)
_HASH = Patch(
    name="vllm-compile-hash",
    reason="vLLM finds what it has compiled by a hash of additional_config too: when an option of ours "
    "changes, it would compile the policy again, for 30 to 120 seconds",
    upstream="vllm/config/vllm.py, VllmConfig.compute_hash",
    until="a plugin says which of its options change the graph",
)


@dataclasses.dataclass
class Misfits:
    """What of ours does not fit the installed vLLM, as far as its modules are imported."""

    failure: str | None = None  # why this vLLM is not supported, where an engine asks for us
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # why, by the names of patches


misfits = Misfits()


def register() -> None:
    """`connect`. Where that fails, an engine that asks for us is refused before its launch. Idempotent."""
    misfits.failure = None  # first: a module that is imported already is patched at once, and may not fit
    _patch_create_engine_config()
    try:
        connect()
    except Exception as error:
        misfits.failure = _reason(error)


def connect() -> None:
    """Connect the proposer with the engine, and fix what is wrong in vLLM.

    Raises ConfigError: it is too old; PatchError: these patches were not written for it.
    """
    from rollout_spec.vllm import ascend, runner_and_scheduler
    from rollout_spec.vllm.versions import refuse_old_version

    refuse_old_version()
    ascend.refuse_unknown_pair()
    _patch_init_device()
    runner_and_scheduler.offer_mrv2()
    runner_and_scheduler.choose_scheduler()
    _patch_get_child_info()
    for module, apply in _patched_at_import():
        when_imported(module, apply)


def _patched_at_import() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The modules that are patched once they are imported, each with what patches it."""
    from rollout_spec.vllm import ascend, fixes, upstream
    from rollout_spec.vllm.refusals import refused_requests

    yield _CORE, functools.partial(_apply, _give_aborted_counts)
    yield refused_requests.MODULE, functools.partial(_apply, refused_requests.refuse_requests)
    yield ascend.RUNNER, functools.partial(_apply, ascend.give_runner_drafter)
    for fix, module in fixes.needed_by(upstream.WITH_DRAFTS):
        yield module, functools.partial(_apply, functools.partial(fixes.apply, fix))
    for fix, module in fixes.needed_by(upstream.ALL):
        yield module, functools.partial(_apply_if_it_fits, fix.PATCH, functools.partial(fixes.apply, fix))
    yield "vllm.config.vllm", functools.partial(_apply_if_it_fits, _HASH, _hash_without_our_options)


def import_patched() -> Misfits:
    """Import what an engine's processes would: then the register of patches has all of them, too."""
    from rollout_spec.vllm import ascend

    ascend.import_worker()
    for module, _ in _patched_at_import():
        with contextlib.suppress(ImportError):  # of another version, or for another platform
            importlib.import_module(module)
    return misfits


def _apply(apply: Callable[[Any], None], module: Any) -> None:
    """Patch a module; where that does not fit, engines that ask for us are refused, and no others."""
    try:
        apply(module)
    except Exception as error:
        misfits.failure = misfits.failure or _reason(error)


def _apply_if_it_fits(patch: Patch, apply: Callable[[Any], None], module: Any) -> None:
    """Patch a module for engines without drafts too; where that does not fit, vLLM stays as it is."""
    from vllm.logger import init_logger

    try:
        apply(module)
    except Exception as error:
        if patch.name not in misfits.left_out:
            said = "rollout_spec: the patch %r is left out, so vLLM stays as it is there: %s"
            init_logger(f"vllm.{__name__}").warning(said, patch.name, _reason(error))
        misfits.left_out[patch.name] = _reason(error)


def _reason(error: Exception) -> str:
    ours = isinstance(error, (ConfigError, PatchError))
    return str(error) if ours else f"rollout_spec does not fit the installed vLLM: {error!r}"


def _patch_init_device() -> None:
    """Give a worker's proposer and samplers what they need as soon as the worker has a model runner."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    @wrap(WorkerWrapperBase, "init_device", _BIND)
    def init_device_and_bind(init_device: Any, self: Any) -> None:
        from rollout_spec.vllm.refusals.checks import refuse_unsupported

        vllm_config = self.worker.vllm_config
        config = engine_options(vllm_config)
        if config is not None:
            refuse_unsupported(vllm_config, config)
        if has_our_drafter(vllm_config) and vllm_config.use_v2_model_runner:
            from rollout_spec.vllm.mrv2 import runner as mrv2_runner

            mrv2_runner.patch_init_speculator()
        init_device(self)
        if config is not None:
            _bind(self.worker, config)


def _bind(worker: Any, config: SpecConfig) -> None:
    from vllm.platforms import current_platform

    from rollout_spec.vllm import fixes
    from rollout_spec.vllm.both_runners.logit_rows import most_logit_rows
    from rollout_spec.vllm.both_runners.top_k_top_p import cut_rows_alike

    if getattr(worker, "model_runner", None) is None:
        return
    if misfits.failure:
        raise ConfigError(misfits.failure)
    fixes.fix_recurrent_states(worker.vllm_config)
    if not config.keyed:
        return
    if not current_platform.is_out_of_tree():
        cut_rows_alike(most_logit_rows(worker.vllm_config, config) if config.enabled else None)
    if worker.vllm_config.use_v2_model_runner:
        from rollout_spec.vllm.mrv2.runner import bind
    else:
        from rollout_spec.vllm.mrv1.runner import bind
    bind(worker, config)


def _patch_create_engine_config() -> None:
    """Check an engine's options where its configuration is made."""
    from vllm.engine.arg_utils import EngineArgs

    @wrap(EngineArgs, "create_engine_config", _CHECK)
    def create_checked_engine_config(create: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        from rollout_spec.vllm.refusals.checks import check_options

        check_spelling(self.additional_config)
        options, speculative = asked_options(self.additional_config), self.speculative_config or {}
        if misfits.failure and (speculative.get("model") == PROPOSER or options is not None):
            raise ConfigError(misfits.failure)
        try:
            vllm_config = create(self, *args, **kwargs)
        except ValidationError as error:  # pydantic wraps what we raise while vLLM makes its configuration
            causes = (each.get("ctx", {}).get("error") for each in error.errors())
            raise next((cause for cause in causes if isinstance(cause, ConfigError)), error) from None
        check_options(vllm_config)
        return vllm_config


def _give_aborted_counts(core: Any) -> None:
    """Let an engine core answer `TAKE_ABORTED`: the counts as a dictionary; None where nobody counts."""

    def take_aborted(self: Any) -> dict[str, Any] | None:
        take = getattr(self.scheduler, "take_aborted", None)
        return None if take is None else take().to_dict()

    setattr(core.EngineCore, TAKE_ABORTED, take_aborted)
    record(_ABORTED)


def _hash_without_our_options(config: Any) -> None:
    """Let what vLLM has compiled be found again when only options of ours have changed."""

    @wrap(config.VllmConfig, "compute_hash", _HASH)
    def hash_others(compute_hash: Any, self: Any, *args: Any, **kwargs: Any) -> str:
        if asked_options(self.additional_config) is not None:
            others = {key: value for key, value in self.additional_config.items() if key != OPTIONS_KEY}
            self = copy.copy(self)
            self.additional_config = others
        return str(compute_hash(self, *args, **kwargs))


def _patch_get_child_info() -> None:
    """Give each of a request's n samples a noise key of its own."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    @wrap(ParentRequest, "get_child_info", _NUMBER)
    def get_numbered_child_info(get_child_info: Any, self: Any, index: int) -> tuple[str, Any]:
        from rollout_spec.vllm.keys import with_numbered_key

        request_id, params = get_child_info(self, index)
        return request_id, with_numbered_key(params, index)
