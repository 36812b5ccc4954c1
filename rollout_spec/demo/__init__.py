"""A complete RL run on a machine without an accelerator: model, data, reward and two trainings.

In: a plan. Out: two runs and their comparison.
May import: `report`, `verl_cpu`; it starts verl as a user would, in processes of its own.
"""
