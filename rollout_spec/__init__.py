"""Model-free, lossless speculative decoding for RL rollouts with verl and vLLM."""

__version__ = "0.1.0"
