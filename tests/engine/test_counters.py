"""What is counted of each request; and that a step without drafts is vLLM's plain step."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_spec.vllm import SCHEDULER
from tests.engine.conftest import proposer_of
from tests.engine.test_life_cycle import PROMPTS, generate, greedy


def count_by_hand(
    llm: Any, params: list[Any], stop_token: int, aborted: set[str]
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Run the prompts step by step; returns what finished, and per request what was seen to happen.

    The requests in `aborted` are aborted when two of their drafts have been verified.

    A draft is what the proposer returned; it was verified if the request got tokens in the next step, and
    accepted as far as these tokens equal it, the last of them excluded, which is the target's own.
    """
    engine, proposer = llm.llm_engine, proposer_of(llm)
    runner, propose = proposer._runner, proposer.propose
    pending: dict[str, list[int]] = {}
    counts: dict[str, dict[str, int]] = {}

    def watching_propose(sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        ids = list(runner.input_batch.req_ids)
        for request_id, tokens in zip(ids, sampled, strict=True):
            draft = pending.pop(request_id, None)
            if not tokens:
                continue
            if draft is None:  # the prefill
                counts[request_id] = dict.fromkeys(
                    ("num_decoded_tokens", "num_decode_steps", "num_drafts", "num_draft_tokens",
                     "num_accepted_tokens"), 0,
                )  # fmt: skip
                continue
            agree = 0
            while agree < min(len(draft), len(tokens) - 1) and draft[agree] == tokens[agree]:
                agree += 1
            assert agree == len(tokens) - 1, "only accepted tokens come before the target's own"
            stops = runner.requests[request_id].sampling_params.stop_token_ids
            kept = tokens[: tokens.index(stop_token) + 1] if stops and stop_token in tokens else tokens
            counts[request_id]["num_decoded_tokens"] += len(kept)
            counts[request_id]["num_decode_steps"] += 1
            counts[request_id]["num_drafts"] += bool(draft)
            counts[request_id]["num_draft_tokens"] += len(draft)
            counts[request_id]["num_accepted_tokens"] += agree
        drafts = propose(sampled, *args, **kwargs)
        pending.update(zip(ids, drafts, strict=True))
        return drafts

    proposer.propose = watching_propose
    for i, setting in enumerate(params):
        engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i // 2]}, setting)
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        # The engine adds a suffix of its own to a request's id.
        by_name = {name.split("-")[0]: count for name, count in counts.items()}
        due = {name for name in aborted if by_name[name]["num_drafts"] == 2}
        engine.abort_request(sorted(due), internal=False)
        aborted -= due
    return finished, by_name


def test_the_counts_of_a_request_equal_those_taken_by_hand(make_engine: Any) -> None:
    llm = make_engine({"batch_threshold": 6}, scheduler_cls=SCHEDULER)
    stop_token = generate(llm, PROMPTS[:1])[0][15]
    params = [greedy(40 + 9 * i, stop_token_ids=[stop_token] if i < 2 else None) for i in range(8)]
    finished, counts = count_by_hand(llm, params, stop_token, {"5", "6"})
    assert finished.keys() == counts.keys() - {"5", "6"}
    assert any(output.outputs[0].finish_reason == "stop" for output in finished.values())
    assert sum(count["num_accepted_tokens"] for count in counts.values()) > 0
    assert counts["5"]["num_decode_steps"] > counts["5"]["num_drafts"] == 2, "steps without a draft, and with"
    for name, output in finished.items():
        assert output.kv_transfer_params["rollout_spec"] == counts[name], name
    core = llm.llm_engine.engine_core.engine_core
    assert core.rollout_spec_take_aborted() == {
        key: counts["5"][key] + counts["6"][key] for key in counts["5"]
    }
    assert not any(core.rollout_spec_take_aborted().values())


def test_an_engines_own_counts_of_a_request_equal_those_taken_by_hand(make_engine: Any) -> None:
    from rollout_spec.vllm.scheduler import counters_of

    llm = make_engine({"batch_threshold": 6}, scheduler_cls=SCHEDULER)
    finished, counts = count_by_hand(llm, [greedy(40 + 9 * i) for i in range(8)], -1, set())
    assert sum(count["num_accepted_tokens"] for count in counts.values()) > 0
    assert {name: counters_of(output).to_dict() for name, output in finished.items()} == counts


def test_a_step_without_drafts_is_a_plain_step(make_engine: Any) -> None:
    """vLLM 0.32 verifies it too, and fails with top_k."""
    from vllm import SamplingParams

    llm = make_engine({"batch_threshold": 0, "verify": "standard"})
    verifier = proposer_of(llm)._runner.rejection_sampler
    verifier.register_forward_pre_hook(lambda *_: pytest.fail("a step without drafts was verified"))
    top_k = SamplingParams(top_k=5, max_tokens=20, ignore_eos=True, detokenize=False)
    assert {len(tokens) for tokens in generate(llm, params=top_k)} == {20}
