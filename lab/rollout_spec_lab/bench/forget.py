"""An engine's drafter as it was before it has seen anything, as benchmarks and tests ask between two runs."""

from rollout_spec.vllm.proposing.live_requests import LiveRequests
from rollout_spec.vllm.proposing.proposer import BatchProposer


def forget_all(proposer: BatchProposer) -> None:
    proposer.take_counters()
    proposer.drafter = None  # its memory first
    proposer.drafter, proposer.requests = proposer.new_drafter(), LiveRequests()
