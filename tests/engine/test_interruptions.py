"""Samples that are aborted and go on as other requests, whose prompt holds what they have generated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rollout_spec.drafting.history import group_key
from tests.engine.conftest import proposer_of, token_ids
from tests.engine.test_coupled import LENGTH, OFF, PROMPTS, generate, params
from tests.text import merged

PROMPT = PROMPTS[0]
GROUP = "a prompt"


def sampled(number: int, max_tokens: int = LENGTH) -> Any:
    """A sample's parameters, as verl's agent loops send them in every request of it."""
    extra_args = {"rollout_spec_key": [3, number], "rollout_spec_group": GROUP}
    extra_args |= {"rollout_spec_group_tokens": len(PROMPT), "rollout_spec_turn_tokens": len(PROMPT)}
    return params({"temperature": 1.0, "extra_args": extra_args}, max_tokens=max_tokens)


def history_of(packed: bytes) -> list[list[int]]:
    history = merged(packed)
    assert len(history) == 1
    return [response.tolist() for response in history.get(group_key(GROUP))]


def going_on(llm: Any, generated: dict[int, list[int]]) -> dict[int, list[int]]:
    """What each of the interrupted samples generates in all, once it has gone on as another request."""
    rest = generate(
        llm,
        [sampled(number, LENGTH - len(tokens)) for number, tokens in generated.items()],
        [PROMPT + tokens for tokens in generated.values()],
    )
    return {
        number: tokens + more
        for (number, tokens), more in zip(generated.items(), token_ids(rest), strict=True)
    }


def uninterrupted(llm: Any, numbers: Iterable[int]) -> dict[int, list[int]]:
    return going_on(llm, {number: [] for number in numbers})


def interrupted(llm: Any) -> dict[int, list[int]]:
    """What sample n has generated when it is aborted: n tokens, or a few more where it drafts."""
    engine, generated = llm.llm_engine, {}
    for number in range(1, LENGTH):
        engine.add_request(str(number), {"prompt_token_ids": PROMPT}, sampled(number))
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            if len(tokens) >= number and not output.finished:
                generated[number] = tokens
                engine.abort_request([output.request_id], internal=False)
    return generated


def test_a_sample_that_is_aborted_anywhere_goes_on_as_if_it_were_not(make_engine: Any) -> None:
    """No position's noise is drawn twice, none is left out."""
    llm = make_engine({})
    between_drafts, everywhere = interrupted(llm), interrupted(make_engine({"batch_threshold": 0}))
    assert proposer_of(llm).take_counters().num_draft_tokens > 0
    assert len({len(tokens) for tokens in between_drafts.values()}) > LENGTH / 2
    assert [len(tokens) for tokens in everywhere.values()] == list(range(1, LENGTH))
    expected = uninterrupted(make_engine(**OFF), everywhere)
    assert going_on(llm, everywhere) == expected
    assert going_on(llm, between_drafts) == {number: expected[number] for number in between_drafts}


def test_the_history_has_each_finished_text_once(make_engine: Any) -> None:
    """A weight sync: samples that had finished just before, and others that go on behind it."""
    llm, texts = make_engine({"history": 100}), {}
    engine, lengths = llm.llm_engine, {number: 12 if number < 4 else LENGTH for number in range(12)}
    for number, length in lengths.items():
        engine.add_request(str(number), {"prompt_token_ids": PROMPT}, sampled(number, length))
    while any(len(texts.get(number, [])) < 12 for number in range(4)):
        for output in engine.step():
            texts[int(output.request_id)] = list(output.outputs[0].token_ids)
    aborted = {number: texts[number] for number in range(4, 12)}
    assert all(0 < len(tokens) < LENGTH for tokens in aborted.values())
    engine.abort_request([str(number) for number in aborted], internal=False)
    proposer_of(llm).drop_texts([str(number) for number in aborted])
    assert sorted(history_of(proposer_of(llm).pack_history())) == sorted(texts[i] for i in range(4))
    texts |= going_on(llm, aborted)
    assert sorted(history_of(proposer_of(llm).take_history())) == sorted(texts.values())


def test_history_is_taken_while_a_request_runs(make_engine: Any) -> None:
    """It may have come in between the server's question and the engine's answer."""
    llm, texts = make_engine({"history": 100}), {}
    engine, proposer = llm.llm_engine, proposer_of(llm)
    for number, length in enumerate((12, LENGTH)):
        engine.add_request(str(number), {"prompt_token_ids": PROMPT}, sampled(number, length))
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[number := int(output.request_id)] = list(output.outputs[0].token_ids)
            if output.finished and number == 0:
                assert history_of(proposer.take_history([], ["0"])) == [texts[0]]
                assert history_of(proposer.pack_history([], [])) == [texts[0]]
    assert history_of(proposer.take_history([], ["1"])) == [texts[1]]


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
