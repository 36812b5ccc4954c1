"""The demo's model, files and configuration, each made in a process of its own, for `runner` and recipes."""

import json
import sys
from pathlib import Path

import hydra
import omegaconf

from rollout_spec_lab.demo.data import make_data
from rollout_spec_lab.demo.model import make_model
from rollout_spec_lab.demo.turns import prompts_of


def write_config(file: str, model: str, train_file: str, num_steps: str, *overrides: str) -> None:
    """Write what verl makes of the overrides, and the prompts of so many training steps."""
    import verl  # noqa: F401 - loads the plugin

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", list(overrides))
    omegaconf.OmegaConf.resolve(config.rollout.spec)  # by resolvers that are here only
    prompts = prompts_of(config, model, train_file, int(num_steps))
    Path(file).write_text(json.dumps([omegaconf.OmegaConf.to_container(config), prompts]))


if __name__ == "__main__":
    if sys.argv[1] == "model":
        make_model(sys.argv[2])
    elif sys.argv[1] == "files":  # of a recipe's training; what is there stays
        make_model(Path(sys.argv[2]) / "model")
        make_data(Path(sys.argv[2]))
    else:
        write_config(*sys.argv[2:])
