"""What can happen to a request while it runs, and what is counted and remembered of it."""

import pytest
from vllm import SamplingParams

from rollout_spec.vllm.keys import CALL_KEY, GROUP_KEY, GROUP_TOKENS_KEY, SAMPLE_KEY
from tests.engine.conftest import core_of, proposer_of
from tests.engine.serving import PROMPTS, generate, greedy


def test_turns_go_on_where_their_sample_stands(make_engine):
    """A tool speaks between them. With a name of the sample, and without."""
    plain, drafted = make_engine(), make_engine({})
    for names in ({SAMPLE_KEY: "a", GROUP_KEY: "g", GROUP_TOKENS_KEY: len(PROMPTS[0])}, {}):
        proposer_of(drafted).take_counters()
        prompt = [*PROMPTS[0], len(names) + 20]
        for turn in range(3):
            params = greedy(20, extra_args={**names, CALL_KEY: turn})
            [said], [same] = (generate(llm, [prompt], params) for llm in (plain, drafted))
            assert said == same
            prompt = [*prompt, *said, 30, 31 + turn]
        assert proposer_of(drafted).take_counters().num_resumed == 2


def test_a_row_at_its_end_does_not_cost_the_others_their_drafts(make_engine):
    """vLLM would not call the drafter, and verify K zeros a row, while one row is within K of the end."""
    llm = make_engine({}, fresh=True, max_model_len=64)
    scheduler, scheduled = core_of(llm).scheduler, []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *args, **kwargs: scheduled.append(schedule(*args, **kwargs)) or scheduled[-1]
    generate(llm, [PROMPTS[0] + [9] * 44, *PROMPTS[1:]], [greedy(500), *(greedy(30) for _ in PROMPTS[1:])])
    num_steps = sum(output.total_num_scheduled_tokens > 0 for output in scheduled)
    assert proposer_of(llm).take_counters().num_steps == num_steps


def test_a_step_without_drafts_is_a_plain_step(make_engine):
    """vLLM 0.32 verifies it too, and fails with top_k."""
    llm = make_engine({"batch_threshold": 0}, fresh=True)
    verifier = proposer_of(llm)._runner.rejection_sampler
    verifier.register_forward_pre_hook(lambda *_: pytest.fail("a step without drafts was verified"))
    top_k = SamplingParams(top_k=5, max_tokens=20, ignore_eos=True, detokenize=False)
    assert {len(tokens) for tokens in generate(llm, params=top_k)} == {20}
