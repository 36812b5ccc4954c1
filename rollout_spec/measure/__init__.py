"""What drafting gains, costs and changes: replay, simulate, bench and certify.

In: recorded rollouts, a model, options. Out: numbers and dataclasses; `cli` prints them, `report` draws them.
May import: `config`, `metrics`, `processes`, `drafting`, `verification`, `vllm`, `report`, arctic_inference,
numpy, torch, vllm. Engines run in `engine_worker` and `certify` only.
"""
