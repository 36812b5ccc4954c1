"""Runs read back, compared, and shown: logs to comparisons to pages, pictures and wandb.

In: what verl's loggers left, and rollouts on disk. Out: a comparison, as HTML, PNG, JSON or a wandb table.
May import: `config`, `metrics`, `trace`, jinja2, matplotlib, numpy, pyarrow, rich, tensorboard,
tokenizers, wandb.
"""
