"""verl's configuration with our groups, and that of our recipes, as Hydra composes them."""

import copy
import functools
import itertools
from pathlib import Path

import verl  # noqa: F401 - loads the plugin, which puts our groups on Hydra's search path
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from rollout_spec.verl.check_config import MODES, check_config

ROOT = Path(__file__).parents[1]
RECIPES = ("grpo", "dapo")
RECIPE_SIZES = ("qwen3_8b", "qwen3_32b", "qwen3_235b")
DEVICES = ("gpu", "npu")
VLLM = "actor_rollout_ref.rollout.name=vllm"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


@functools.cache
def composed_once(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [VLLM, *overrides])


def composed(*overrides):
    """verl's configuration. Groups are composed once: that takes most of a second."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    chosen = ("rollout.spec", "rollout.spec.routing")  # files, though their names have a dot
    groups = [o.input_line for o in parsed if "." not in o.key_or_group or o.key_or_group in chosen]
    config = copy.deepcopy(composed_once(*groups))
    for each in parsed:
        if each.input_line not in groups:
            force_add = each.is_add() or each.is_force_add()
            OmegaConf.update(config, each.key_or_group, each.value(), force_add=force_add)
    return config


def composed_recipe(recipe, size, *overrides):
    chosen = f"rollout_spec_recipe={recipe}", f"rollout_spec_size={size}"
    return composed_recipe_file("train", *chosen, *overrides)


def composed_recipe_file(name, *overrides):
    with initialize_config_dir(str(ROOT / "recipes"), version_base=None):
        return compose(name, list(overrides))


def check_recipe(config):
    check_config(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    for section in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"):
        omega_conf_to_dataclass(OmegaConf.select(config, section))
    OmegaConf.to_container(config, resolve=True)


def recipe_layouts():
    """Every size on every device; recipes and modes go round, so that each recipe meets each mode."""
    places = itertools.product(enumerate(RECIPE_SIZES), enumerate(DEVICES))
    return [(RECIPES[(i + j) % 2], size, device, MODES[i % len(MODES)]) for (i, size), (j, device) in places]
