"""Ascend NPUs: our drafter in vllm-ascend's model runner, and what it cannot have there."""

import importlib.util
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.environment import package_version
from rollout_spec.patches import Patch, guard_parameters, wrap
from rollout_spec.vllm import versions
from rollout_spec.vllm.options import names_our_proposer

REJECTION_SAMPLER = "vllm_ascend.sample.rejection_sampler"
RUNNER = "vllm_ascend.worker.model_runner_v1"
# The releases of vllm-ascend whose model runner is given our drafter, each with the vLLM that it is for.
PAIRS = {"0.23.0": "0.23.0", "0.23.0.post1": "0.23.0", "0.24.0rc1": "0.24.0"}
# Options of vllm-ascend with which a token is not drawn from the whole of its logits, or not when we draw it.
PARTIAL_LOGITS = ("enable_async_exponential", "enable_reduce_sample")

_DRAFTER = Patch(
    name="vllm-ascend-custom-class",
    reason="vllm-ascend's model runner has no custom_class: an engine with our drafter ends with 'Unknown "
    "speculative decoding method: custom_class'",
    upstream="vllm_ascend/worker/model_runner_v1.py, NPUModelRunner",
    until="vllm-ascend has the method, as its pull request 15710 adds it",
)


def import_worker() -> None:
    """Import vllm-ascend's worker as an engine's process does, if it is installed."""
    if importlib.util.find_spec("vllm_ascend"):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        importlib.import_module("vllm_ascend.worker.worker")


def refuse_unknown_pair() -> None:
    """Raise a ConfigError if vllm-ascend has no place for our drafter, or needs another vLLM."""
    installed, vllm = package_version("vllm-ascend"), versions.version()
    if installed is None:
        return
    found = installed.partition("+")[0]
    if PAIRS.get(found) != vllm and not has_custom_class():
        pairs = ", ".join(f"{ours} with {theirs}" for ours, theirs in PAIRS.items())
        raise ConfigError(f"vllm-ascend {found} with vllm {vllm} is not supported: take {pairs}")


def has_custom_class() -> bool:
    """Whether the installed vllm-ascend knows the method by itself; read, for to import it takes an NPU."""
    spec = importlib.util.find_spec("vllm_ascend")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [f / name for f in folders for name in ("spec_decode/__init__.py", "worker/model_runner_v1.py")]
    return any("custom_class" in file.read_text() for file in files if file.is_file())


def give_runner_drafter(module: Any) -> None:
    """Let NPUModelRunner make our drafter, and ask it for drafts where it asks others: after bookkeeping.

    Raises PatchError: the two methods are gone, or called in another way.
    """
    if has_custom_class():
        return
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    runner = module.NPUModelRunner
    guard_parameters(_DRAFTER, runner, "propose_draft_token_ids", ("self", "valid_sampled_token_ids"))

    @wrap(runner, "_get_drafter", _DRAFTER)
    def get_drafter_or_ours(get_drafter: Any, self: Any) -> Any:
        if not names_our_proposer(self.vllm_config):
            return get_drafter(self)
        return create_custom_proposer(self.vllm_config)

    @wrap(runner, "propose_draft_token_ids", _DRAFTER)
    def propose_or_ask_ours(
        propose: Any, self: Any, valid_sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not names_our_proposer(self.vllm_config):
            return propose(self, valid_sampled_token_ids, *args, **kwargs)
        batch = self.input_batch
        return self.drafter.propose(valid_sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu)
