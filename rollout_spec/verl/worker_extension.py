"""What verl loads into each worker of an engine."""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollout_spec.vllm.proposing.control import ProposerControl
from rollout_spec.vllm.proposing.proposer import proposer_of


class SpecWorkerExtension(vLLMColocateWorkerExtension):
    """In each of the engine's workers: how `Drafters` reaches the worker's drafter."""

    def rollout_spec_call(self, method: str, *args: Any) -> Any:
        """What this method of `ProposerControl` returns; None where there is no drafter that is used."""
        proposer = proposer_of(getattr(self, "model_runner", None))
        if proposer is None or not proposer.drafts_here:
            return None
        # One for all calls: it remembers which pieces of the history are still to be handed on.
        control = self.__dict__.setdefault("rollout_spec_control", ProposerControl(proposer))
        return getattr(control, method)(*args)

    def _get_drafter_model(self) -> Any:
        """The MTP head that a weight sync loads into; verl and its helpers look for it where MRV1 has it."""
        runner = self.model_runner
        config, speculator = runner.vllm_config, getattr(runner, "speculator", None)
        if config.speculative_config.model != config.model_config.model:
            return None  # a head of the user's own: no sync has its weights
        if speculator is not None:
            runner.drafter = speculator
        return super()._get_drafter_model()
