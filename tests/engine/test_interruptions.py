"""Samples that are aborted and go on as other requests, whose prompt holds what they have generated."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_spec.drafting.history import History, group_key
from tests.engine.conftest import proposer_of, token_ids
from tests.engine.test_coupled import LENGTH, OFF, PROMPTS, generate, params

PROMPT = PROMPTS[0]
GROUP = "a prompt"


def sampled(number: int, max_tokens: int = LENGTH) -> Any:
    """A sample's parameters, as verl's agent loops send them in every request of it."""
    extra_args = {"rollout_spec_key": [3, number], "rollout_spec_group": GROUP}
    extra_args |= {"rollout_spec_group_tokens": len(PROMPT), "rollout_spec_turn_tokens": len(PROMPT)}
    return params({"temperature": 1.0, "extra_args": extra_args}, max_tokens=max_tokens)


def history_of(packed: bytes) -> list[list[int]]:
    history = History(1000, 1 << 20)
    history.merge(packed)
    assert len(history) == 1
    return [response.tolist() for response in history.get(group_key(GROUP))]


def abort_when_due(llm: Any) -> dict[str, list[int]]:
    """Sample number n until it has n tokens or more; returns what each has generated when it is aborted."""
    engine, generated = llm.llm_engine, {}
    for number in range(1, LENGTH):
        engine.add_request(str(number), {"prompt_token_ids": PROMPT}, sampled(number))
    while engine.has_unfinished_requests():
        for output in engine.step():
            generated[output.request_id] = list(output.outputs[0].token_ids)
            if len(output.outputs[0].token_ids) >= int(output.request_id):
                engine.abort_request([output.request_id], internal=False)
    return generated


def test_a_sample_that_is_aborted_anywhere_goes_on_as_if_it_were_not(make_engine: Any) -> None:
    """No position's noise is drawn twice, none is left out, and only whole texts are remembered, once."""
    numbers = range(1, LENGTH)
    whole = token_ids(generate(make_engine(**OFF), [sampled(n) for n in numbers], [PROMPT] * len(numbers)))
    llm = make_engine({"history": 1000})
    generated = abort_when_due(llm)
    lengths = [len(generated[str(number)]) for number in range(1, LENGTH)]
    assert len(set(lengths)) > LENGTH / 2 and min(lengths) == 1
    proposer_of(llm).end_step(list(generated))
    going_on = {number: tokens for number, tokens in generated.items() if len(tokens) < LENGTH}
    rest = token_ids(
        generate(
            llm,
            [sampled(int(number), LENGTH - len(tokens)) for number, tokens in going_on.items()],
            [PROMPT + tokens for tokens in going_on.values()],
        )
    )
    for (number, tokens), more in zip(going_on.items(), rest, strict=True):
        assert tokens + more == whole[int(number) - 1]
    remembered = history_of(proposer_of(llm).take_history())
    assert sorted(remembered) == sorted(whole[int(number) - 1] for number in going_on)
    assert proposer_of(llm).take_counters().num_draft_tokens > 0


def test_the_first_of_a_group_to_come_may_have_been_interrupted(make_engine: Any) -> None:
    """As on the server that it goes on at: its siblings are behind the same prompt, and are remembered."""
    llm = make_engine({"history": 1000})
    before = [9, 10, 11]
    [rest] = token_ids(generate(llm, [sampled(1)], [PROMPT + before]))
    siblings = token_ids(generate(llm, [sampled(2), sampled(3)], [PROMPT] * 2))
    index = proposer_of(llm)._drafter.index
    index.validate()
    assert index.stats().num_groups == 1
    remembered = history_of(proposer_of(llm).take_history())
    assert remembered == [before + rest, *siblings] or remembered == [before + rest, *siblings[::-1]]


@pytest.mark.parametrize("num_group_tokens", [None, -1, 3.5, "two", True, 10_000])
def test_what_a_caller_says_of_the_group_costs_nothing(make_engine: Any, num_group_tokens: Any) -> None:
    llm = make_engine({})
    sampling = sampled(1)
    sampling.extra_args["rollout_spec_group_tokens"] = num_group_tokens
    generate(llm, [sampling] * 2, [PROMPT] * 2)
    counters = proposer_of(llm).take_counters()
    assert counters.num_failed_steps == 0 and counters.num_draft_tokens > 0
