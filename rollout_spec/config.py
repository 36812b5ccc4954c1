"""The options of `rollout.spec`: one frozen dataclass that checks every range, once and here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

METHODS = ("sam", "off", "keyed")
ROUTINGS = ("group", "verl")
MAX_SPECULATIVE_TOKENS = 64
MAX_ON_NPUS = 15  # vllm-ascend's attention takes 16 tokens of a request in a step with drafts
AUTO = "auto"  # of batch_threshold


class UserError(Exception):
    """Something that the user can put right. The command line shows it as one line, with exit code 2."""


class ConfigError(UserError, ValueError):
    """An option that is unknown, of the wrong type or out of range. The message names the field."""


def _option(
    default: Any,
    help_: str,
    when: str,
    limits: tuple[float | None, float | None] = (None, None),
    or_auto: type | None = None,
) -> Any:
    """A field; one of type `or_auto` takes AUTO as well. `when` completes "Change it when ..."."""
    metadata = {"help": help_, "when": when, "low": limits[0], "high": limits[1], "or_auto": or_auto}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """Options of the drafter; the field names are the YAML keys under `rollout.spec`.

    Raises ConfigError: a value has the wrong type or lies outside its range.
    """

    method: str = _option(
        "sam",
        "sam: draft with the suffix automaton; off: plain verl and vLLM; keyed: no drafts, and the tokens "
        "that a run with drafts samples",
        "you need a baseline that is measured in the same way. With verl, start it with `+rollout.spec=off`, "
        "or with `+rollout.spec=off rollout.spec.method=keyed`",
    )
    num_speculative_tokens: int = _option(
        MAX_ON_NPUS,  # so that `+rollout.spec=sam` is enough there too
        "at most this many draft tokens per request and step",
        "text repeats in long runs (more)",
        (1, MAX_SPECULATIVE_TOKENS),
    )
    max_draft_tokens: int = _option(
        1024,
        # With some 300 tokens in a step an H100 computes as long as it reads the weights of a dense policy.
        "at most this many draft tokens in a step, the likeliest of all requests. Memory is kept for their "
        "logits: 0.9 GiB for 1,024 of Qwen3",
        "memory is short (fewer), or many requests of a large mixture of experts run (more)",
        (1, 1 << 20),
    )
    model_tokens: int = _option(
        3,
        "with vLLM alone and a draft model: the most tokens that the model drafts per request and step. "
        "`num_speculative_tokens` limits model and text together. With verl, set `num_speculative_tokens` of "
        "`mtp` or of `model_drafter` instead",
        "more than 3 of the model's tokens are often right (more)",
        (1, MAX_SPECULATIVE_TOKENS),
    )
    min_survival: float = _option(
        # lab/record/gate.md compares it with others, with step times of two CPU cores and an assumed table
        # for a GPU.
        0.2,
        "a draft ends before the token at which the probability that the policy accepts all of it so far "
        "(its survival) falls below this value. Used only with a fixed `batch_threshold`, and by `replay`",
        "you set `batch_threshold` to a number, and a verified token costs much (higher) or little (lower)",
        (0.0, 1.0),
    )
    history: int = _option(
        8,
        "how many responses of earlier training steps to keep per prompt; 0: none",
        "no prompt returns in a later training step (0 saves memory), or prompts return often (more)",
        (0, 1 << 16),
    )
    corpus: str = _option(
        "",
        "a file of recorded rollouts, or of `rollout-spec corpus build`, to draft from too; none if empty",
        "`replay --spec corpus=FILE` shows a gain on your recordings",
    )
    batch_threshold: int | str = _option(
        AUTO,
        "auto: draft where it saves time; a number: draft while at most this many requests decode",
        "you want the published rule (8), or `achieved_gain` stays below 1 because step times vary",
        (0, 1 << 20),
        int,
    )
    routing: str = _option(
        "group",
        "with verl only. group: samples of a prompt share an engine until it is `max_imbalance` requests "
        "ahead of the emptiest; larger groups split; verl: "
        "verl's own router, which balances load, or the one that `router_config_path` names",
        "engines wait for the one with the longest responses (`load_imbalance`), or you have a router",
    )
    max_imbalance: int = _option(
        8,
        "with `routing=group`: by so many requests may an engine, or a data-parallel rank, exceed the "
        "emptiest one for the sake of siblings; 0: by none",
        "`load_imbalance` is high (fewer), or groups are larger and should stay whole (their size)",
        (0, 1 << 20),
    )
    max_index_mb: int = _option(
        1024,
        "most MiB for the index, and as many again for the history, in each engine or data-parallel rank",
        "`num_untracked_rows` is above 0 (more), or memory is short (less)",
        (1, 1 << 20),
    )
    untested_vllm: bool = _option(
        False,
        "true: draft with a vLLM newer than those that we have tested; false: refuse it",
        "you want to try such a vLLM. `certify` shows whether its tokens stay the same",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        for name, choices in (("method", METHODS), ("routing", ROUTINGS)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"rollout.spec.{name}={value!r}: must be one of {', '.join(choices)}")

    @property
    def enabled(self) -> bool:
        """Whether our drafter drafts."""
        return self.method == "sam"

    @property
    def keyed(self) -> bool:
        """Whether tokens are drawn with our noise, drafts or not."""
        return self.method != "off"

    @property
    def max_index_bytes(self) -> int:
        return self.max_index_mb << 20

    @property
    def most_model_tokens(self) -> int:
        """Of a row's draft tokens, those of a model that drafts beside the text."""
        return min(self.model_tokens, self.num_speculative_tokens)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], model_option: str = "") -> SpecConfig:
        """Build from a plain mapping (YAML, JSON); an unknown key is an error, a missing one its default.
        `model_option`: the option that stands in the place of `model_tokens` with verl."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                names = [model_option or name if name == "model_tokens" else name for name in known]
                raise ConfigError(f"rollout.spec.{key}: unknown field (known fields: {', '.join(names)})")
        # null, as of an environment variable that is not set
        given: dict[str, Any] = {**options, "corpus": options.get("corpus") or ""}
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def parse_threshold(text: str) -> int | str:
    """A `batch_threshold` of the command line; SpecConfig checks it."""
    try:
        return int(text)
    except ValueError:
        return text


def _check(field: dataclasses.Field, value: Any) -> None:
    if field.metadata["or_auto"] and isinstance(value, str):
        if value == AUTO:
            return
        if value.isdecimal():
            fix = f"write {value} without quotes, or {AUTO}"
            raise ConfigError(f"rollout.spec.{field.name} is the text {value!r}: {fix}")
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be a number or {AUTO}")
    expected = field.metadata["or_auto"] or type(field.default)
    # bool is an int to Python, but `num_speculative_tokens=true` is a mistake.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number if expected is float else type(value) is expected):
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be of type {expected.__name__}")
    low, high = field.metadata["low"], field.metadata["high"]
    if low is not None and not (low <= value <= high and math.isfinite(value)):
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be between {low:g} and {high:,.9g}")
