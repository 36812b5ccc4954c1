"""Drafting inside verl's trainer: options, rollout servers, metrics, history and routing.

In: verl's Hydra configuration, requests and checkpoints. Out: engine arguments, metrics in verl's stream.
May import: `config`, `metrics`, `patches`, `trace`, `drafting`, `vllm`, hydra, omegaconf, ray,
tensordict, transfer_queue, transformers, verl, vllm. verl imports `entry_point` in each of its processes.
"""
