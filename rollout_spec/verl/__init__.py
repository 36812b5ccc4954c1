"""Drafting inside verl's trainer: options, rollout servers, metrics, history and routing.

In: verl's Hydra configuration, requests and checkpoints. Out: engine arguments, metrics in verl's stream.
Read `check_config` (on the driver), `hooks` and `replica` (in the trainer), `agent_loop` and `router`
(between), `server` (in each rollout server), `worker_extension` (in each of its engine's workers). verl
imports `entry_point` in all its processes. It never chooses a token.
May import: `config`, `files`, `homes`, `metrics`, `patches`, `recurrent`, `trace`, `drafting`, `vllm`,
hydra, omegaconf, ray, tensordict, transfer_queue, transformers, verl, vllm.
"""
