"""Noise keys: a request's name decides, else its seed, else its turn; and callers may send anything."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.verification.noise import make_key
from rollout_spec.vllm import keys as request_keys
from rollout_spec.vllm.keys import CALL_TOKENS_KEY, GROUP_KEY, GROUP_TOKENS_KEY, NAME_KEY, key_of_name


def request(seed=None, **extra_args):
    params = SimpleNamespace(seed=seed, extra_args=extra_args or None)
    return SimpleNamespace(sampling_params=params)


def test_the_names_in_a_request_are_those_that_callers_send():
    """Clients in other languages write them; a server of another version reads them."""
    assert [NAME_KEY, GROUP_KEY] == ["rollout_spec_key", "rollout_spec_group"]
    assert [request_keys.SAMPLE_KEY, request_keys.CALL_KEY] == ["rollout_spec_sample", "rollout_spec_call"]
    assert [GROUP_TOKENS_KEY, CALL_TOKENS_KEY] == ["rollout_spec_group_tokens", "rollout_spec_call_tokens"]


def test_a_name_gives_the_same_key_in_every_run():
    """Known answers: other keys would draw other tokens than the run that is repeated did."""
    assert key_of_name(["run", 1, None]) == make_key("key", '["run", 1, null]') == 6816210893450739066
    assert key_of_name("é") == make_key("key", '"\\u00e9"') == 7310880984173021414
    assert key_of_name({"a": [1, "b"], "b": 2}) == key_of_name({"b": 2, "a": [1, "b"]}) == 1613700016594163164


def test_different_names_give_different_keys_also_where_json_cannot_write_them():
    names = ["1", 1, 1.5, True, None, [], [1], ["1"], [[1]], {"a": 1}, {"1": 1}, "", "a", "A", [1, 2], [2, 1]]
    assert len({key_of_name(name) for name in names}) == len(names)
    endless: list[Any] = []
    endless.append(endless)
    assert key_of_name(endless) == key_of_name(endless) != key_of_name([])
    assert key_of_name({1: "a", "b": 2}) != key_of_name({1: "a", "b": 3})
    assert key_of_name({1, 2}) == key_of_name("{1, 2}")


def test_a_seed_comes_after_a_name_and_before_the_turn():
    keys = request_keys.RequestKeys(3)
    live = {
        "named": request(4, **{NAME_KEY: "a"}), "seeded": request(4), "also": request(4), "zero": request(0),
        "empty name": request(4, **{NAME_KEY: None}), "unnamed": request(),
    }  # fmt: skip
    named, seeded, also, zero, empty, unnamed = keys.rows(list(live), live)
    assert named == key_of_name("a")
    assert seeded == also == empty == make_key("seed", 4)
    assert zero == make_key("seed", 0)
    assert unnamed == make_key("arrival", 3, 1)


def test_unnamed_requests_are_numbered_as_they_come_and_keep_their_numbers():
    keys, live = request_keys.RequestKeys(3), {"a": request(), "b": request()}
    arrivals = [make_key("arrival", 3, number) for number in range(1, 7)]
    assert keys.rows(["b"], live) == arrivals[1:2]
    assert keys.rows(["b", "a"], live) == [arrivals[1], arrivals[0]]
    live["named"] = request(**{NAME_KEY: 1})
    live["c"] = request()
    del live["a"]
    assert keys.rows(["c", "b", "named"], live) == [arrivals[2], arrivals[1], key_of_name(1)]
    # One that comes back under the name of one that has gone is another request.
    assert keys.rows(["b"], {"b": live["b"]}) == arrivals[1:2]
    live["a"] = request()
    assert keys.rows(["a"], live) == arrivals[4:5]
    live["a"] = request()  # though no step came between the two
    assert keys.rows(["a"], live) == arrivals[5:6]
    live["a"] = request(**{NAME_KEY: 2})
    assert keys.rows(["a"], live) == [key_of_name(2)]
    assert request_keys.RequestKeys(4).rows(["b"], {"b": request()}) != arrivals[:1]


def test_data_parallel_ranks_number_requests_apart():
    """The first as an engine that has no other; also requests without parameters, or fields in them."""
    found = []
    for rank in range(3):
        parallel = SimpleNamespace(data_parallel_index=rank)
        runner = SimpleNamespace(model_config=SimpleNamespace(seed=3), parallel_config=parallel)
        found.append(request_keys.keys_of(runner).new_key(None))
    assert len({*found}) == 3
    assert found[0] == request_keys.RequestKeys(3).new_key(SimpleNamespace()) == make_key("arrival", 3, 1)


def test_each_of_n_samples_has_a_key_of_its_own_where_it_has_a_name():
    params = SimpleNamespace(extra_args={NAME_KEY: "a", "other": 1}, n=2)
    first, second = (request_keys.with_numbered_key(params, index) for index in range(2))
    assert first.extra_args == {NAME_KEY: ["a", 0], "other": 1} and first.n == 2
    assert second.extra_args == {NAME_KEY: ["a", 1], "other": 1}
    assert params.extra_args == {NAME_KEY: "a", "other": 1}
    for unnamed in (None, {}, {"other": 1}, {NAME_KEY: None}, "text", [NAME_KEY]):
        params = SimpleNamespace(extra_args=unnamed)
        assert request_keys.with_numbered_key(params, 1) is params and params.extra_args is unnamed


HUGE = 10**5000  # more digits than Python writes
NO_TEXTS = ("\ud800", "a\udfff", HUGE, -HUGE, b"g", ["g"], {"g": 1}, object())
NOTHING = (None, "text", [NAME_KEY, GROUP_KEY], 7, {}, {NAME_KEY: None, GROUP_KEY: None})


@pytest.mark.parametrize(
    ("extra_args", "names"),
    [
        (
            {NAME_KEY: "a", GROUP_KEY: "g", GROUP_TOKENS_KEY: 3, CALL_TOKENS_KEY: 5},
            (key_of_name("a"), "g", 3, 5),
        ),
        ({GROUP_KEY: 7, GROUP_TOKENS_KEY: 0}, (None, "7", 0, None)),
        ({request_keys.SAMPLE_KEY: 5, request_keys.CALL_KEY: 2}, (None, None, None, None, "5", 2)),
        ({request_keys.SAMPLE_KEY: [5], request_keys.CALL_KEY: -2}, (None, None, None, None, "[5]")),
        ({GROUP_TOKENS_KEY: 3, CALL_TOKENS_KEY: 0}, (None, None, None, 0)),
        ({GROUP_KEY: "", GROUP_TOKENS_KEY: sys.maxsize}, (None, "", sys.maxsize, None)),
        ({NAME_KEY: HUGE, GROUP_KEY: "g", CALL_TOKENS_KEY: 2}, (None, "g", None, 2)),
        *((said, (None,) * 4) for said in NOTHING),
        *(({GROUP_KEY: group, GROUP_TOKENS_KEY: 3}, (None,) * 4) for group in NO_TEXTS),
        *(
            ({GROUP_KEY: "g", GROUP_TOKENS_KEY: number, CALL_TOKENS_KEY: number}, (None, "g", None, None))
            for number in (-1, HUGE, sys.maxsize + 1, 1.0, "3", True, None, [2])
        ),
    ],
    ids=lambda said: type(said).__name__,
)
def test_what_a_request_says_of_itself(extra_args, names):
    assert request_keys.read_names(extra_args) == request_keys.RequestNames(*names)


def test_a_name_that_cannot_be_written_is_none():
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    assert request_keys.read_names({NAME_KEY: nested}).key is None
    while nested:  # freed one by one: all at once would need as deep a stack
        nested = nested.pop()
    keys = request_keys.RequestKeys(3)
    assert keys.new_key(request(4, **{NAME_KEY: HUGE}).sampling_params) == make_key("seed", 4)
    assert keys.new_key(request(**{NAME_KEY: HUGE}).sampling_params) == make_key("arrival", 3, 1)
