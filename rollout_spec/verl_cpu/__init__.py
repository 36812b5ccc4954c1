"""A platform `cpu` for verl: training and rollout on a machine without an accelerator.

It knows nothing of drafting and stays inert where there is an accelerator.
May import: `rollout_spec.patches`, verl, torch.
"""
