"""Ascend NPUs: our drafter in vllm-ascend's model runner, and its rejection sampling without its loops."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rollout_spec.config import ConfigError
from rollout_spec.patches import Patch, guard_parameters, replace_function, when_imported
from rollout_spec.verification import standard
from rollout_spec.vllm import versions
from rollout_spec.vllm.options import names_our_drafter

MODULE = "vllm_ascend.sample.rejection_sampler"
RUNNER = "vllm_ascend.worker.model_runner_v1"
# The releases of vllm-ascend whose model runner is given our drafter, each with the vLLM that it is for.
PAIRS = {"0.23.0": "0.23.0", "0.23.0.post1": "0.23.0", "0.24.0rc1": "0.24.0"}
# Options of vllm-ascend with which a token is not drawn from the whole of its logits, or not when we draw it.
_NOT_COUPLED = ("enable_async_exponential", "enable_reduce_sample")

_DRAFTER = Patch(
    name="vllm-ascend-custom-class",
    reason="vllm-ascend's model runner has no custom_class: an engine with our drafter ends with 'Unknown "
    "speculative decoding method: custom_class'",
    upstream="vllm_ascend/worker/model_runner_v1.py, NPUModelRunner",
    until="vllm-ascend has the method, as its pull request 15710 adds it",
)
_LOOPS = Patch(
    name="vllm-ascend-rejection-sample",
    reason="vllm-ascend 0.11 verifies drafts in Python loops over requests and positions, with transfers to "
    "the host in each",
    upstream="vllm_ascend/sample/rejection_sampler.py",
    until="vllm-ascend hands logits on instead of probabilities, as 0.18 does: it has no such loops then",
)
_SIGNATURES = {
    "rejection_sample": "(draft_token_ids: torch.Tensor, num_draft_tokens: list[int], max_spec_len: int, "
    "cu_num_draft_tokens: torch.Tensor, draft_probs: Optional[torch.Tensor], target_probs: torch.Tensor, "
    "bonus_token_ids: torch.Tensor, sampling_metadata: vllm.v1.sample.metadata.SamplingMetadata) "
    "-> torch.Tensor",
    "expand_batch_to_tokens": "(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, "
    "replace_from: int = 0, replace_to: int = 0) -> torch.Tensor",
}


def import_worker() -> None:
    """Import vllm-ascend's worker as an engine's process does, if it is installed."""
    if importlib.util.find_spec("vllm_ascend"):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        importlib.import_module("vllm_ascend.worker.worker")


def refuse_unknown_pair() -> None:
    """Raise where the installed vllm-ascend has no place for our drafter, or is not for the installed vLLM.

    Raises:
        ConfigError: naming both.
    """
    try:
        found = metadata.version("vllm-ascend").partition("+")[0]
    except metadata.PackageNotFoundError:
        return
    vllm = versions.version()
    if PAIRS.get(found) != vllm and not has_custom_class():
        pairs = ", ".join(f"{ours} with {theirs}" for ours, theirs in PAIRS.items())
        raise ConfigError(f"vllm-ascend {found} with vllm {vllm} is not supported: take {pairs}")


def has_custom_class() -> bool:
    """Whether the installed vllm-ascend knows the method by itself; read, for to import it takes an NPU."""
    spec = importlib.util.find_spec("vllm_ascend")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [f / name for f in folders for name in ("spec_decode/__init__.py", "worker/model_runner_v1.py")]
    return any("custom_class" in file.read_text() for file in files if file.is_file())


def refuse_uncoupled(additional_config: Mapping[str, Any]) -> None:
    """Raise for vLLM's `additional_config` with what `verify=coupled` cannot have.

    Raises:
        ConfigError: naming the option.
    """
    for name in _NOT_COUPLED:
        if additional_config.get(name):
            raise ConfigError(
                f"additional_config.{name}: not with rollout.spec.verify=coupled; switch it off or set "
                "rollout.spec.verify=standard"
            )


def give_runner_drafter(module: Any) -> None:
    """Let NPUModelRunner make our drafter, and ask it for drafts where it asks others: behind bookkeeping.

    Raises:
        PatchError: the two methods are gone, or called in another way.
    """
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    if has_custom_class():
        return
    runner = module.NPUModelRunner
    get_drafter, propose = runner._get_drafter, runner.propose_draft_token_ids
    guard_parameters(_DRAFTER, runner, "propose_draft_token_ids", ("self", "valid_sampled_token_ids"))

    @functools.wraps(get_drafter)
    def get_drafter_or_ours(self: Any) -> Any:
        if not names_our_drafter(self.vllm_config):
            return get_drafter(self)
        return create_custom_proposer(self.vllm_config)

    @functools.wraps(propose)
    def propose_or_ask_ours(self: Any, valid_sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not names_our_drafter(self.vllm_config):
            return propose(self, valid_sampled_token_ids, *args, **kwargs)
        batch = self.input_batch
        return self.drafter.propose(valid_sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu)

    replace_function(runner, "_get_drafter", get_drafter_or_ours, patch=_DRAFTER, expected_signature="(self)")
    replace_function(runner, "propose_draft_token_ids", propose_or_ask_ours, patch=_DRAFTER)


@functools.cache
def mend_ascend_sampling() -> None:
    """Replace the loops as soon as vllm-ascend's module is imported; where it is not installed, never."""
    when_imported(MODULE, replace_loops)


def replace_loops(module: Any) -> None:
    """Let `standard` stand in for the functions of vllm-ascend 0.11; later ones are left alone.

    Raises:
        PatchError: they are gone, or called in another way than in 0.11.
    """
    from vllm.v1.sample import rejection_sampler

    found = getattr(module, "rejection_sample", None)
    if found is not None and "target_probs" not in inspect.signature(found).parameters:
        return
    # The module puts its own into vLLM's.
    owners = [(module, name) for name in _SIGNATURES] + [(rejection_sampler, "expand_batch_to_tokens")]
    for owner, name in owners:
        replacement = _in_place_of(getattr(owner, name, None), name)
        replace_function(owner, name, replacement, patch=_LOOPS, expected_signature=_SIGNATURES[name])


def _in_place_of(published: Any, name: str) -> Any:
    function = getattr(standard, name)
    signature = inspect.signature(published or function)

    @functools.wraps(published or function)
    def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if "target_probs" in bound.arguments:  # ours takes logits, in the same place
            bound.arguments["target_probs"] = bound.arguments["target_probs"].log()
        return function(*bound.args)

    return replacement
