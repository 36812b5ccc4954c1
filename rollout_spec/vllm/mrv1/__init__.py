"""What belongs to vLLM's model runner V1 (MRV1) only: its samplers, and a model that drafts there.

In: the runner, its batch, the calls of its samplers and of its drafter. Out: tokens drawn with a request's
own noise; a model's drafts, for the proposer. May import: `drafting`, `patches`, `verification`, numpy,
torch, vllm; of `rollout_spec.vllm` what is beside this folder, but not `plugin` or `checks`.
It never imports `mrv2`.
"""
