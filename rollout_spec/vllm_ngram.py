"""vLLM's n-gram drafter, for comparison: the numba code that its engine runs, without the engine."""

from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

__all__ = ["batch_propose_numba"]
