"""What belongs to MRV2, vLLM's newer model runner: speculators, samplers, scheduling, tokens on the host.

In: the runner, its batch, the calls of its samplers and of its speculator. Out: drafts for the next step;
tokens drawn with a request's own noise.
May import: `config`, `drafting`, `patches`, `verification`, `vllm`, numpy, torch, vllm.
It never imports `plugin` or MRV1's. `enable` and `ahead` let vLLM choose it; a worker begins with `runner`.
"""
