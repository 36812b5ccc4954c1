"""What drafters, engines, the host and the index take in time, measured on this machine.

In: recorded rollouts, or prompts and a model. Out: records, with their tables and pictures.
May import: rollout_spec, `processes`, `roofline`, `verl_cpu`, arctic_inference, matplotlib, numpy, torch,
triton, vllm. It trains nothing.
"""
