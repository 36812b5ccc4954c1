"""What belongs to vLLM's model runner V2 (MRV2) only: speculators, samplers, its tokens on the host.

In: the runner, its batch, the calls of its samplers and of its speculator. Out: drafts for the scheduler,
tokens drawn with a request's own noise. May import: `config`, `drafting`, `patches`, `verification`, numpy,
torch, vllm; of `rollout_spec.vllm` what is beside this folder, but not `plugin` or `checks`.
It never imports `mrv1`.
"""
