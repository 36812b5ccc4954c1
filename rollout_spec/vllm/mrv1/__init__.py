"""What belongs to MRV1, vLLM's older model runner.

In: the runner, its batch, the calls of its samplers and of its drafter. Out: tokens drawn with a request's
own noise; a model's drafts, for the proposer.
May import: `config`, `drafting`, `patches`, `verification`, `vllm`, numpy, torch, vllm.
It never imports `plugin`, `refusals` or MRV2's. A worker begins with `runner`, whose classes stand
before vLLM's. `sampler` stands before vLLM's two samplers, with `row_generators`, `rejection`, `min_tokens`
and `kept_logprobs`; `proposers` before a model that drafts. `prompt_rows` is for recurrent layers.
"""
