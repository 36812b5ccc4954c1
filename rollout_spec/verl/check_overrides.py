"""Checks the overrides on the command line, on the driver, before Hydra composes anything."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.errors import HydraException

from rollout_spec.config import METHODS, ConfigError, SpecConfig
from rollout_spec.verl import model_drafter

_MISSPELT = (
    r"\+\+rollout\.spec=",  # two pluses
    r"\+*rollout/spec=",  # a slash, as in Hydra's defaults lists
    r"\+*rollout=.*\bspec\b",  # a dictionary
    r"\+*rollout\.spec\.method=(?!keyed$)",  # the method as an option
    r"\+*(actor_rollout_ref\.rollout\.spec|rollout_spec)[.=]",  # another place
    rf"\+*rollout\.(?!spec=)\w+=({'|'.join(METHODS)})$",  # another word for spec
)
_AS_IT_IS, _CHECKED_LATER = Transformer.identity, ("method", "routing", "corpus")
_KEYED = "for keyed write +rollout.spec=off rollout.spec.method=keyed"


def check_overrides(arguments: Sequence[str]) -> None:
    """Raise a ConfigError for overrides that Hydra would refuse in many lines, before any check of ours, or
    take for something else."""
    asked = [each.partition("=")[2] for each in arguments if each.startswith("+rollout.spec=")]
    if len(asked) > 1:
        raise ConfigError(f"+rollout.spec is given {len(asked)} times: {', '.join(asked)}")
    _refuse_misspelt(arguments, has_method=bool(asked))
    # Several in a sweep.
    methods = [method for each in asked for method in ([each] if "{" in each else each.split(","))]
    for method in methods:
        if method not in ("sam", "off"):
            raise ConfigError(f"rollout.spec={method}: must be one of sam, off; {_KEYED}")
    _refuse_options(arguments, is_sweep=len(methods) > 1)


def _refuse_misspelt(arguments: Sequence[str], has_method: bool) -> None:
    """What looks like `+rollout.spec=METHOD` and is none: Hydra would do nothing for it."""
    has_own_config = any(re.match(r"--config-|-c[pnd]", each) for each in arguments)
    patterns = [*_MISSPELT]
    if not has_own_config:
        patterns += [r"~?rollout\.spec(=|$)"] if has_method else [r"~?\+*rollout\.spec([.=]|$)"]
    for argument in arguments:
        if has_method and re.match(r"\+*rollout\.spec=\{", argument):
            raise ConfigError(f"{argument}: write each option by itself, as rollout.spec.history=4")
        if any(re.match(pattern, argument) for pattern in patterns):
            raise ConfigError(f"{argument}: write +rollout.spec=sam or +rollout.spec=off; {_KEYED}")


def _refuse_options(arguments: Sequence[str], is_sweep: bool) -> None:
    """`rollout.spec.NAME=VALUE` where NAME is no option, or where a sweep has no such key yet."""
    known = {field.name for field in dataclasses.fields(SpecConfig)} | {model_drafter.OPTION}
    for argument in arguments:
        if is_sweep and argument.startswith("rollout.spec."):
            raise ConfigError(f"{argument}: in a sweep over rollout.spec Hydra takes it as ++{argument} only")
        override = re.match(r"\+{0,2}rollout\.spec\.([^.=@]+)=(.*)", argument)
        if override is None:
            continue
        name, given = override.groups()
        if name == "model_tokens":
            raise ConfigError(f"rollout.spec.model_tokens={given}: {model_drafter.MODEL_TOKENS}")
        if name not in known:
            SpecConfig.from_mapping({name: given}, model_drafter.OPTION)  # says which there are
        if argument.startswith("+rollout"):
            raise ConfigError(f"{argument}: write {argument[1:]}, with no plus or with two")
        if name not in (*_CHECKED_LATER, model_drafter.OPTION) and "$" not in argument:
            with contextlib.suppress(HydraException):  # which Hydra says itself
                [parsed] = OverridesParser.create().parse_overrides([argument])
                # Hydra checks a job of a sweep in its turn: after hours.
                values = parsed.sweep_iterator(_AS_IT_IS) if parsed.is_sweep_override() else [parsed.value()]
                for one in values:
                    SpecConfig.from_mapping({name: one})
