"""A complete RL run on a machine without an accelerator: model, data, reward and the trainer's settings."""
