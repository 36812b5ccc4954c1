"""A complete RL run on a machine without an accelerator: model, data, reward, turns, and two trainings.

In: a plan. Out: the speed with drafts off and on in turns, two trainings and their comparison, a report.
May import: rollout_spec, `bench`, `processes`, `verl_cpu`, hydra, numpy, omegaconf, pandas, psutil,
torch, transformers, verl. verl runs in processes of its own; it trains as a user starts it.
"""
