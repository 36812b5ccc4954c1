"""The pretrained policy: greedy text is the same with and without drafts, stop strings included."""

from __future__ import annotations

from typing import Any

from tests.engine.conftest import proposer_of, token_ids

QUESTIONS = [
    "List the days of the week, one a line, and then list them again in the same order.",
    "What is 17 + 25? Show each step, then give the answer as `Answer: <number>`.",
    "Write a short poem about rain and repeat its first line at the end.",
    "Name three fruits and three vegetables.",
]


def test_greedy_text_of_the_pretrained_policy(make_engine: Any, policy: str) -> None:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=96, stop=["Answer:"] if i == 1 else None)
        for i in range(len(QUESTIONS))
    ]
    outputs = []
    for spec in (None, {"num_speculative_tokens": 4}):
        llm = make_engine(spec, model=policy)
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs.append(llm.chat(messages, params, use_tqdm=False))
    plain, drafted = outputs
    assert token_ids(drafted) == token_ids(plain)
    assert [o.outputs[0].finish_reason for o in drafted] == [o.outputs[0].finish_reason for o in plain]
    assert [o.outputs[0].text for o in drafted] == [o.outputs[0].text for o in plain]
    assert proposer_of(llm).take_counters().num_accepted_tokens > 0
