"""vLLM's own drafters, for comparison: the objects that its engine calls, without the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

__all__ = ["batch_propose_numba", "suffix_proposer"]


def suffix_proposer(num_speculative_tokens: int, **options: float) -> SuffixDecodingProposer:
    """vLLM's `suffix` with its suffix_decoding_* options, all of them; no row reaches the model's length.

    Raises:
        ImportError: arctic-inference is not installed.
    """
    named: dict[str, Any] = {f"suffix_decoding_{name}": value for name, value in options.items()}
    # Of a VllmConfig, whose making needs a model, the fields that the proposer reads.
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens, **named),
        model_config=SimpleNamespace(max_model_len=1 << 30),
    )
    return SuffixDecodingProposer(config)
