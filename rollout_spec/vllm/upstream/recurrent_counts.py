"""Rows of MRV1 that a step leaves out: vLLM forgets how many of their last tokens were accepted.

The next step of such a row then reads the state of its first slot, an old one. A step leaves a row out where
the drafts of the rows before it use up the step's tokens.
"""

from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import RECURRENT_MRV1

WHERE = {RECURRENT_MRV1: "vllm.v1.worker.gpu_model_runner"}
PATCH = Patch(
    name="vllm-recurrent-counts",
    reason="with drafts, the tokens of a policy with recurrent layers are wrong: a row that a step leaves "
    "out for want of tokens reads the state of its first slot when it comes back",
    upstream="vllm/v1/worker/gpu_input_batch.py, InputBatch.add_request sets num_accepted_tokens_cpu to 1",
    until="a row that leaves MRV1's batch for a step keeps its number of accepted tokens",
)
_KEPT = "_rollout_spec_accepted"


def fix(module: Any) -> None:
    """Give a row that comes back to MRV1's batch its number of accepted tokens."""

    # 0.23, 0.24; 0.29; 0.32, 0.33
    @wrap(module.GPUModelRunner, "_update_states", PATCH, "2dbbf041", "20cd99a3", "88fa4464")
    def update_and_keep_counts(update: Any, self: Any, scheduler_output: Any) -> Any:
        if self.speculative_config is None or not self.model_config.is_hybrid:
            return update(self, scheduler_output)
        kept = _keep(self, scheduler_output)
        updated = update(self, scheduler_output)
        for name in kept.keys() & self.input_batch.req_id_to_index.keys():
            self.input_batch.num_accepted_tokens_cpu[self.input_batch.req_id_to_index[name]] = kept.pop(name)
        return updated


def _keep(runner: Any, scheduler_output: Any) -> dict[str, int]:
    """The numbers of accepted tokens of rows that wait, by request; one that starts anew has none."""
    kept: dict[str, int] = vars(runner).setdefault(_KEPT, {})
    batch, event = runner.input_batch, runner.num_accepted_tokens_event
    leaving = batch.req_id_to_index.keys() - scheduler_output.num_scheduled_tokens.keys()
    if leaving and event is not None:
        event.synchronize()  # the numbers come from the device
    for name in leaving:
        kept[name] = int(batch.num_accepted_tokens_cpu[batch.req_id_to_index[name]])
    for name in scheduler_output.finished_req_ids | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
        kept.pop(name, None)
    return kept
