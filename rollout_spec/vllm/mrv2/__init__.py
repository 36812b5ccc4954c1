"""What belongs to MRV2, vLLM's newer model runner.

In: the runner, its batch, the calls of its samplers and of its speculator. Out: drafts for the next step;
tokens drawn with a request's own noise.
May import: `config`, `drafting`, `patches`, `verification`, `vllm`, numpy, torch, vllm.
It never imports `plugin`, `refusals` or MRV1's. `ahead` has its scheduler. A worker begins with `runner`,
whose classes stand before vLLM's; they call `host_drafts`. Its `arrival_queue` waits for `arrivals`, has
their tokens in `host_batch`, and drafts after them; `room` puts drafts into a step. `sampler` stands before
vLLM's own. `speculators` has ours, and what stands before a model's. `graphs` captures; `graphs_24` and
`graphs_29` have vLLM of their versions find what was captured. `sampler_24` has what only 0.24 needs.
`shortfall` is for `certify`.
"""
