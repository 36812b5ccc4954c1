"""A complete RL run on a machine without an accelerator: model, data, reward and two trainings.

In: a plan. Out: two runs and their comparison.
May import: rollout_spec, `bench`, `processes`, `verl_cpu`, numpy, omegaconf, pandas, torch,
transformers. verl runs in processes of its own, as a user starts it.
"""
