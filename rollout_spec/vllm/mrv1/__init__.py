"""What belongs to MRV1, vLLM's older model runner.

In: the runner, its batch, the calls of its samplers and of its drafter. Out: tokens drawn with a request's
own noise; a model's drafts, for the proposer.
May import: `config`, `drafting`, `patches`, `verification`, `vllm`, numpy, torch, vllm.
It never imports `plugin`, `checks` or MRV2's. A worker begins with `runner`, whose classes stand before
vLLM's; `sampler` hooks vLLM's two samplers, with what `row_generators` and `rejection`
have, `proposers` a model that drafts.
"""
