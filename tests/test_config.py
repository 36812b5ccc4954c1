"""Options: what each may be, and the error that names field and range."""

import dataclasses

import pytest

from rollout_spec.config import METHODS, ConfigError, SpecConfig


def test_defaults_are_valid_and_survive_a_round_trip():
    config = SpecConfig()
    assert SpecConfig.from_mapping(config.to_dict()) == config
    for name, value in (("batch_threshold", "auto"), ("min_survival", 1)):
        assert getattr(SpecConfig.from_mapping({name: value}), name) == value
    configs = [SpecConfig(method=method) for method in METHODS]
    assert [(each.enabled, each.keyed) for each in configs] == [(True, True), (False, False), (False, True)]


NUMBERS = [field for field in dataclasses.fields(SpecConfig) if field.metadata["low"] is not None]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
@pytest.mark.parametrize("end", ["low", "high"])
def test_both_ends_of_a_range(field, end):
    number = field.metadata["or_auto"] or type(field.default)
    limit = field.metadata[end]
    inside, outside = number(limit), number(limit + (1 if end == "high" else -1))
    assert getattr(SpecConfig(**{field.name: inside}), field.name) == inside
    with pytest.raises(ConfigError, match=rf"rollout\.spec\.{field.name}=.* must be between .* and "):
        SpecConfig(**{field.name: outside})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_token": 4}, "num_speculative_token: unknown field (known fields: method, "),
        ({"num_speculative_tokens": "4"}, "rollout.spec.num_speculative_tokens='4': must be of type int"),
        ({"num_speculative_tokens": 2.0}, "must be of type int"),
        ({"min_survival": float("nan")}, "must be between 0 and 1"),
        ({"method": "ngram"}, "must be one of sam, off, keyed"),
        ({"batch_threshold": "8"}, "batch_threshold is the text '8': write 8 without quotes, or auto"),
        ({"batch_threshold": "fast"}, "rollout.spec.batch_threshold='fast': must be a number or auto"),
        ({"batch_threshold": 1.5}, "rollout.spec.batch_threshold=1.5: must be of type int"),
        ({"routing": "random"}, "rollout.spec.routing='random': must be one of group, verl"),
    ],
)
def test_bad_options_name_the_field(options, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        SpecConfig.from_mapping(options)
