"""An engine's drafter as it was before it has seen anything, as benchmarks and tests ask between two runs."""

from rollout_spec.vllm.live_requests import LiveRequests
from rollout_spec.vllm.proposer import SuffixProposer


def forget_all(proposer: SuffixProposer) -> None:
    proposer.take_counters()
    proposer.drafter = None  # its memory first
    proposer.drafter, proposer.requests = proposer.new_drafter(), LiveRequests()
