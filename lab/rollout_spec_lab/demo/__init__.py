"""A complete RL run on a machine without an accelerator: model, data, reward and two trainings.

In: a plan. Out: two runs and their comparison.
May import: `config`, `processes`, `trace`, `verl`, `report`, pandas, torch, transformers. verl runs in
processes of its own, as a user starts it.
"""
