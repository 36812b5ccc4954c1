"""The options of `rollout.spec`: one frozen dataclass, every range checked once, here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

METHODS = ("sam", "off")
MODES = ("sam", "earliest", "frequent", "suffix_policy")
VERIFY = ("coupled", "standard")
ROUTINGS = ("default", "group")
MAX_SPECULATIVE_TOKENS = 64
AUTO = "auto"  # of batch_threshold and min_token_prob
# What min_token_prob=auto is, in mode sam to begin with, without and with history (record/drafters.md).
MIN_TOKEN_PROB, MIN_TOKEN_PROB_WITH_HISTORY = 0.2, 0.055


class ConfigError(ValueError):
    """An option that is unknown, of the wrong type or out of range. The message names the field."""


def _option(
    default: Any, help_: str, low: float | None = None, high: float | None = None, or_auto: type | None = None
) -> Any:
    """A field; one of type `or_auto` takes AUTO as well."""
    metadata = {"help": help_, "low": low, "high": high, "or_auto": or_auto}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """Options of the drafter; the field names are the YAML keys under `rollout.spec`.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    method: str = _option("sam", "sam: draft with the suffix automaton; off: plain verl and vLLM")
    mode: str = _option("sam", "how drafts are chosen: sam, earliest, frequent or suffix_policy")
    verify: str = _option(
        "coupled", "coupled: the same tokens with and without drafts; standard: the same distribution"
    )
    num_speculative_tokens: int = _option(8, "most draft tokens per row and step", 1, MAX_SPECULATIVE_TOKENS)
    min_match_len: int = _option(
        1, "shortest suffix match that is drafted from, in tokens; mode sam does not heed it", 1, 1024
    )
    max_spec_factor: float = _option(
        2.0,
        "draft at most this many tokens per matched token; mode sam does not heed it",
        0.0,
        1024.0,
    )
    min_token_prob: float | str = _option(
        AUTO,
        "stop a draft where its estimated survival falls below; auto: mode sam spends as many draft tokens "
        f"as SuffixDecoding would, other modes {MIN_TOKEN_PROB}, with history "
        f"{MIN_TOKEN_PROB_WITH_HISTORY}; mode earliest does not heed it, batch_threshold=auto has prices of "
        "its own",
        0.0,
        1.0,
        float,
    )
    group_sharing: bool = _option(True, "samples of one prompt share one index")
    history: int = _option(
        0,
        "responses of earlier steps kept per prompt, 0: none (what mode sam has learned of wording stays)",
        0,
        1 << 16,
    )
    corpus: str = _option("", "file of `rollout-spec corpus build` that is drafted from too; none if empty")
    corpus_margin: int = _option(
        1, "heed the corpus where its match is at least this many tokens longer", 1, 1024
    )
    batch_threshold: int | str = _option(
        8,
        "more decoding requests than this and no row drafts; auto: draft what is worth its cost",
        0,
        1 << 20,
        int,
    )
    routing: str = _option("default", "group: siblings to one engine while load allows; default: verl's own")
    max_groups: int = _option(512, "most prompts indexed at a time; idle ones make room", 1, 1 << 20)
    max_index_mb: int = _option(
        1024,
        "byte budget of the index and of the history, MiB each, in every worker of an engine; what finds the "
        "price may take 3/16 more",
        1,
        1 << 20,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        _check_choice("method", self.method, METHODS)
        _check_choice("mode", self.mode, MODES)
        if self.history and not self.group_sharing:
            raise ConfigError(f"rollout.spec.history={self.history!r}: must be 0 without group_sharing")
        _check_choice("verify", self.verify, VERIFY)
        _check_choice("routing", self.routing, ROUTINGS)

    @property
    def enabled(self) -> bool:
        return self.method != "off"

    @property
    def coupled(self) -> bool:
        return self.verify == "coupled"

    @property
    def least_survival(self) -> float:
        """What `min_token_prob` comes to, or begins with if it `has_own_price`."""
        if not isinstance(self.min_token_prob, str):
            return self.min_token_prob
        return MIN_TOKEN_PROB_WITH_HISTORY if self.history else MIN_TOKEN_PROB

    @property
    def has_own_price(self) -> bool:
        """Whether the drafter finds the price of a draft token itself (`rollout_spec.price`)."""
        needs_none = self.batch_threshold in (
            AUTO,
            0,
        )  # a gate with prices of its own, or one that never opens
        return self.min_token_prob == AUTO and self.mode == "sam" and not needs_none

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SpecConfig:
        """Build from a plain mapping (YAML, JSON); an unknown key is an error, a missing one its default."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise ConfigError(f"rollout.spec.{key}: unknown field (known fields: {', '.join(known)})")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def parse_threshold(text: str) -> int | str:
    """A `batch_threshold` of the command line; whether it can be one is SpecConfig's to say."""
    return int(text) if text.lstrip("-").isdecimal() else text


def parse_price(text: str) -> float | str:
    """A `min_token_prob` of the command line; whether it can be one is SpecConfig's to say."""
    try:
        return float(text)
    except ValueError:
        return text


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"rollout.spec.{name}={value!r}: must be one of {', '.join(choices)}")


def _check(field: dataclasses.Field, value: Any) -> None:
    if field.metadata["or_auto"] and isinstance(value, str):
        if value == AUTO:
            return
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be a number or {AUTO}")
    expected = field.metadata["or_auto"] or type(field.default)
    # bool is an int to Python, but `num_speculative_tokens=true` is a mistake.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = is_number if expected is float else type(value) is expected
    if not fits:
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be of type {expected.__name__}")
    low, high = field.metadata["low"], field.metadata["high"]
    if low is not None and not (low <= value <= high and math.isfinite(value)):
        raise ConfigError(f"rollout.spec.{field.name}={value!r}: must be between {low:g} and {high:,.9g}")
