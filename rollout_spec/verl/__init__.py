"""Drafting inside verl's trainer: options, rollout servers, metrics, history and routing.

In: verl's Hydra configuration, requests and checkpoints. Out: engine arguments, metrics in verl's stream.
May import: `vllm`, `drafting`, verl, Ray, Hydra. `plugin` is the entry point.
"""
