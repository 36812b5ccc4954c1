"""What was measured, for a reader: training runs read back and compared; sentences, tables, pictures, pages.

In: what verl's loggers wrote, recorded rollouts, or a command's record. Out: text, HTML, PNG or JSON.
May import: `config`, `files`, `metrics`, `sample_names`, `trace`, jinja2, matplotlib, numpy, tensorboard,
wandb. It measures nothing and prints nothing.
"""
