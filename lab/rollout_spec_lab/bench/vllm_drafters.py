"""vLLM's own drafters, for comparison: the objects that its engine calls, without the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.spec_decode.ngram_proposer import NgramProposer, batch_propose_numba
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

__all__ = ["batch_propose_numba", "ngram_proposer", "suffix_proposer"]


def suffix_proposer(num_speculative_tokens: int, **options: float) -> SuffixDecodingProposer:
    """vLLM's `suffix` with its suffix_decoding_* options, all of them; no row reaches the model's length.

    Raises:
        ImportError: arctic-inference is not installed.
    """
    named: dict[str, Any] = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return SuffixDecodingProposer(_config(num_speculative_tokens, 1 << 30, **named))


def ngram_proposer(
    num_speculative_tokens: int, shortest: int, longest: int, max_num_seqs: int, max_model_len: int
) -> NgramProposer:
    """vLLM's `ngram` for matches of `shortest` to `longest` tokens."""
    lookup: dict[str, Any] = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return NgramProposer(_config(num_speculative_tokens, max_model_len, max_num_seqs, **lookup))


def _config(num_speculative_tokens: int, max_model_len: int, max_num_seqs: int = 1, **options: Any) -> Any:
    """Of a VllmConfig, whose making needs a model, the fields that the proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens, **options),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
