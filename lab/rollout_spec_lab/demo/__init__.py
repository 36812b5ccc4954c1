"""A complete RL run on a machine without an accelerator: model, data, reward, two trainings, and turns.

In: a plan. Out: two trainings and their comparison, the speed with drafts off and on in turns, a report.
May import: rollout_spec, `bench`, `processes`, `verl_cpu`, numpy, omegaconf, pandas, torch,
transformers. verl runs in processes of its own, as a user starts it.
"""
