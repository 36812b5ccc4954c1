"""What drafting gains, costs and changes: replay, simulate, bench, certify, gpu-check; what `doctor` checks.

In: recorded rollouts, a model, options. Out: numbers and dataclasses; `cli` prints them, `report` draws them.
May import: `config`, `metrics`, `patches`, `processes`, `trace`, `drafting`, `verification`, `vllm`, `verl`,
`report`, arctic_inference, hydra, numpy, omegaconf, suffix_gpu, torch, triton, verl, vllm. Engines run in
`engine_worker`, `host_worker`, `check_steps` and `certify` only, and only `diagnosis` asks verl anything.
"""
