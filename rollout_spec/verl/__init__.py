"""Drafting inside verl's trainer: options, rollout servers, metrics, history and routing.

In: verl's Hydra configuration, requests and checkpoints. Out: engine arguments, metrics in verl's stream.
verl imports `entry_point` in all its processes. On the driver are `check_config` and what it asks; in the
trainer the replica of `server` and what begins with `trainer`; between that and the servers `row_names`,
`sample_calls`, `uni_agent`, `client` and `router`; in each rollout server what begins with `server`, and in
each of its engine's workers `worker_extension`. What is changed in other packages is in `changes`. It never
chooses a token.
May import: `config`, `files`, `placement`, `metrics`, `patches`, `recurrent`, `sample_names`, `trace`,
`drafting`, `vllm`, hydra, numpy, omegaconf, ray, tensordict, transfer_queue, transformers, uni_agent, verl,
vllm.
"""
