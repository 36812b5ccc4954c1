"""A platform `cpu` for verl: training and rollout on a machine without an accelerator.

In: verl's plugin hook, in every process of verl. Out: a registered platform, and the patches that it needs.
May import: rollout_spec, ray, torch, transformers, verl, zmq. It knows nothing of drafting, and does nothing
where there is an accelerator.
"""
