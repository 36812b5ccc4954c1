"""Rollouts in virtual time: by hand where that is possible, and what the automatic gate must hold to."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.predict import engine
from rollout_spec.predict.engine import Cluster, Engine, SimulatedModel, step_together
from rollout_spec.predict.load import assign, comes_back, copied, requests_of, rollouts_of
from rollout_spec.predict.simulate import configurations, rollout, simulate
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import ResponseDrafts, Rollout
from tests.text import speak

OFF = SpecConfig(method="off")
FLAT = StepTimes.parse("1:0.01,1000:0.01")  # tokens cost nothing
# Two CPU cores: 8 more tokens are free for 8 rows, 24 more double the time
STEPPED = StepTimes.parse("1:0.05,2:0.052,4:0.06,8:0.085,16:0.088,32:0.17,64:0.3,256:1.2")
DEAR = StepTimes.parse("1:0.01,1000:10")  # every token costs as much as a row


def line(group, prompt, *lengths, rng=None):
    rng = rng or np.random.default_rng(int(group))
    return Rollout(group, None, np.arange(prompt, dtype=np.int32), [speak(rng, n) for n in lengths])


def rollouts(num_groups=6):
    rng = np.random.default_rng(3)
    lengths = np.minimum(60 * rng.lognormal(0.5, 0.8, (num_groups, 8)), 900).astype(int) + 8
    return [line(str(i), 10, *row, rng=np.random.default_rng([3, i])) for i, row in enumerate(lengths)]


def noise(num_groups=4, group_size=8, length=150):
    rng = np.random.default_rng(9)
    return [
        Rollout(str(i), None, rng.integers(0, 50_000, 9).astype(np.int32),
                [rng.integers(0, 50_000, length).astype(np.int32) for _ in range(group_size)])
        for i in range(num_groups)
    ]  # fmt: skip


def served(requests, config, times, max_num_seqs, model=None, **more):
    alone = Engine(config, times, Cluster(1, max_num_seqs, **more), model=model)
    took = rollout([[alone]], [requests])
    assert alone.next_time() is None
    return SimpleNamespace(**vars(alone.total), seconds=took)


def of_group(prompt, *lengths):
    return requests_of([line("0", prompt, *lengths)], None)


def seconds(lines, cluster, config, times):
    return simulate(lines, cluster, config, times)["makespan_s"]


BY_HAND = StepTimes.parse("1:1,2:2,10:10")


def test_a_rollout_without_drafts_by_hand(monkeypatch):
    monkeypatch.setattr(engine, "TAIL_ROWS", 1)
    run = served(of_group(5, 3, 2), OFF, BY_HAND, 1)
    # 5 prompt tokens with the first row, then 2 more steps of it; the sibling computes one of them again.
    assert run.seconds == 5 + 1 + 1 + 1 + 1
    assert (run.num_steps, run.num_tokens, run.tail_seconds) == (5, 5, run.seconds)
    both = served(of_group(5, 3, 2), OFF, BY_HAND, 2)
    assert (both.seconds, both.tail_seconds, both.num_preemptions) == ((5 + 1) + 2 + 1, 1.0, 0)
    assert served(of_group(5, 3, 2), OFF, ContextTimes.parse("1:1"), 2).seconds == (5 + 5) + (6 + 6) + 7


def test_agents_wait_for_their_tools():
    """Two turns of two tokens; the second has three new ones before it. Then another sample's only turn."""
    spans = [np.array([[0, 2], [5, 7]], np.int32), np.array([[1, 3]], np.int32)]
    first, second = requests_of([dataclasses.replace(line("0", 5, 7, 3), turns=spans)], None)
    assert [turn.num_tokens for turn in first.turns] == [7, 12] and second.num_tokens == 8
    run = served([first], OFF, BY_HAND, 1, tool_seconds=100.0)
    assert (run.seconds, run.num_tokens) == (5 + 1 + 100 + 3 + 1, 4)
    # The other one runs meanwhile; of its prompt the tool's token is new.
    both = served([first, second], OFF, BY_HAND, 1, tool_seconds=2.0)
    assert (both.seconds, both.num_tokens) == (5 + 1 + 1 + 1 + 3 + 1, 6)
    drafted = served([first, second], SpecConfig(batch_threshold=4), BY_HAND, 2, tool_seconds=3.0)
    assert drafted.num_tokens == 6


class ContextTimes(StepTimes):
    """A step takes a second a token of context, and a thousand for each token of other ranks."""

    def seconds(self, num_tokens, drafted, num_context=0, num_tokens_of_others=0, num_rows=0):
        return num_context + 1000 * num_tokens_of_others


def modelled():
    """One request of 5 + 6 tokens that nothing but its model knows, which drafts two of them."""
    [rollout] = noise(1, 1, 6)
    ahead = np.append(rollout.responses, np.full(2, -1, np.int32))
    tokens = np.lib.stride_tricks.sliding_window_view(ahead, 2)[:6]
    model_drafts = [ResponseDrafts(tokens, np.full(tokens.shape, 9, np.float32))]
    given = {"prompt_token_ids": rollout.prompt_token_ids[:5], "model_drafts": model_drafts}
    return requests_of([dataclasses.replace(rollout, **given)], None)


MODEL = SimulatedModel(2, StepTimes.parse("1:0.125"))


def test_a_model_by_hand_alone_and_beside_the_index():
    run = served(modelled(), OFF, BY_HAND, 1, model=MODEL)
    # The prompt and the row; then the row with two draft tokens, and with the one that there is room for.
    assert run.seconds == 5 + 3 + 2 + 3 * 2 * 0.125
    assert (run.num_steps, run.num_draft_tokens, run.num_accepted_tokens) == (3, 3, 3)
    closed = served(modelled(), SpecConfig(batch_threshold=0), BY_HAND, 1, model=MODEL)
    assert closed.seconds == 5 + 5 + 6 * 0.125
    assert (closed.num_steps, closed.num_draft_tokens) == (6, 0)
    opened = served(modelled(), SpecConfig(batch_threshold=1), BY_HAND, 1, model=MODEL)
    # The gate says in a step that it is open, and the model drafts in the next.
    assert (opened.num_steps, opened.num_draft_tokens) == (4, 2)
    assert opened.seconds == 5 + 1 + 3 + 1 + (1 + 3 * 2) * 0.125


def test_a_full_cache_sends_the_newest_request_back_to_the_queue():
    """Two rows of 5 tokens fit, with a token each, and of 6, but not of 7."""
    run = served(of_group(5, 4, 3), OFF, BY_HAND, 2, kv_tokens=14)
    # Alone the first row ends; the second comes back with 5 + 2 tokens, of which the prompt is cached.
    assert run.seconds == (5 + 1) + 2 + 1 + 1 + 2
    assert (run.num_tokens, run.num_preemptions) == (7, 1)
    tiny = served(of_group(5, 4, 3), OFF, FLAT, 4, kv_tokens=3)  # one row has more tokens: it runs alone
    assert (tiny.num_tokens, tiny.num_steps) == (7, 7)


@pytest.mark.parametrize(("row_tokens", "num_steps"), [(3, 4), (4, 5), (9, 7)])
def test_fewer_requests_run_where_each_keeps_states(row_tokens, num_steps, monkeypatch):
    """Beside its tokens each row takes some of the cache: both run, the second goes back, or waits."""
    monkeypatch.setattr(StepTimes, "row_tokens", lambda self, num_speculative_tokens: row_tokens)
    run = served(of_group(5, 4, 3), OFF, FLAT, 2, kv_tokens=22)
    assert (run.num_tokens, run.num_steps) == (7, num_steps)


def test_prompts_are_prefilled_in_chunks_beside_rows_that_decode():
    run = served(of_group(5, 3, 2), OFF, BY_HAND, 2, max_num_batched_tokens=3)
    # 3 of the prompt; 2 of it and the one that the sibling computes again; then both rows.
    assert run.seconds == 3 + 3 + 2 + 1 + 0
    assert (run.num_tokens, run.num_steps) == (5, 4)


def test_the_newest_request_goes_back_wherever_its_row_is():
    """The first ends at once, and the last row takes its place."""
    requests = of_group(5, 1, 6, 9)
    alone = Engine(OFF, FLAT, Cluster(1, 3, kv_tokens=18))
    alone.enqueue(requests)
    while alone.total.num_preemptions == 0:
        step_together([alone])
    assert alone.queue[0] == (requests[2], 4)
    assert alone.total.num_tokens == 1 + 4 + 4 + 1


@pytest.mark.parametrize("threshold", [64, "auto"])
def test_requests_that_come_back_are_drafted_for_and_lose_nothing(threshold):
    requests = requests_of(rollouts(), None)
    run = served(requests, SpecConfig(batch_threshold=threshold), FLAT, 16, kv_tokens=1500)
    assert run.num_tokens == sum(len(request.response) for request in requests)
    assert run.num_preemptions > 10
    assert run.num_accepted_tokens > 0.2 * run.num_tokens


def test_data_parallel_ranks_step_together_until_the_last_has_ended():
    requests = of_group(5, 3, 1)
    ranks = [Engine(OFF, ContextTimes.parse("1:1"), Cluster(1, 2)) for _ in range(2)]
    # The first step: each prefills its prompt of 5. Then the first rank is alone.
    assert rollout([ranks], [requests[:1], requests[1:]]) == (5 + 5000) + 1000 + 1000
    assert [(rank.now, rank.total.num_tokens) for rank in ranks] == [(7005.0, 3), (7005.0, 1)]


def test_copies_are_more_of_the_same_with_tokens_of_their_own():
    [one] = noise(1, 2)
    copies = copied([one], 3)
    assert len({each.group for each in copies}) == 3 and copied([one], 1)[0].group == one.group
    tokens = [{*np.concatenate([each.prompt_token_ids, *each.responses]).tolist()} for each in copies]
    assert not tokens[0] & tokens[1] and not tokens[1] & tokens[2]
    assert len(tokens[0]) == len(tokens[1]) == len(tokens[2])


def test_a_response_without_a_token_takes_no_step():
    given = Cluster(2, 4, None), SpecConfig(batch_threshold=8), STEPPED
    with_empty = [line("0", 5, 0, 0), line("1", 5, 3, 0, 2)]
    assert simulate(with_empty, *given) == simulate([line("1", 5, 3, 2)], *given)


def test_padded_drafts_are_all_verified_and_lose_no_token():
    config, lines = SpecConfig(batch_threshold=8, num_speculative_tokens=4), requests_of(rollouts(1), None)
    plain, padded = (served(lines, config, FLAT, 8, pads_drafts=pads) for pads in (False, True))
    assert padded.num_tokens == plain.num_tokens
    assert padded.num_draft_tokens % 4 == 0 < plain.num_draft_tokens
    assert padded.num_draft_tokens > 1.5 * plain.num_draft_tokens


def test_replicas_share_the_requests_and_the_slowest_counts():
    lines = rollouts(4)
    requests = requests_of(lines, 6)
    by_group = assign(requests, 2, 8)
    assert [len(part) for part in by_group] == [12, 12]
    assert {request.group for request in by_group[0]} == {"0", "2"}
    # A large group is split where it would load an engine by too much.
    large = [line("0", 5, *[3] * 40)]
    for max_imbalance, most in ((8, 24), (1, 20)):
        configs = configurations({"max_imbalance": max_imbalance}, [0], [4])
        took = [seconds(large, Cluster(2, 1), config, FLAT) for config in configs]
        assert took == pytest.approx([0.03 * most] * 2)
    one, two = (simulate(lines, Cluster(n, 16, 6), OFF, STEPPED) for n in (1, 2))
    assert 0.4 < two["makespan_s"] / one["makespan_s"] < 0.95
    assert two["tail_share"] > one["tail_share"] > 0.0


def test_drafts_of_ranks_that_step_together_do_not_seem_free(monkeypatch):
    """Each taking the time that all need for its own, they lose; knowing of each other, they do not."""
    cluster = Cluster(1, 8, None, num_ranks=4)
    lines, on = rollouts(8), SpecConfig(batch_threshold="auto")
    drafted = seconds(lines, cluster, on, STEPPED)
    assert drafted < seconds(lines, cluster, OFF, STEPPED)
    begin, end, own = Engine.begin_step, Engine.end_step, {}
    begin_alone = lambda self, now: own.update({self: begin(self, now)}) or own[self]  # noqa: E731
    monkeypatch.setattr(Engine, "begin_step", begin_alone)
    monkeypatch.setattr(Engine, "end_step", lambda self, seconds, _: end(self, seconds, own[self]))
    assert seconds(lines, cluster, on, STEPPED) > 1.01 * drafted


def test_the_lines_of_a_step_are_one_rollout():
    lines = [dataclasses.replace(one, step=i // 2) for i, one in enumerate(rollouts(4))]
    assert [len(part) for part in rollouts_of(lines)] == [2, 2]
    cluster = Cluster(1, 64)
    apart = [seconds(lines[i : i + 2], cluster, OFF, STEPPED) for i in (0, 2)]
    assert seconds(lines, cluster, OFF, STEPPED) == pytest.approx(sum(apart))
    # What the first rollout has taught is not forgotten.
    on = SpecConfig(batch_threshold="auto")
    apart = [seconds(lines[i : i + 2], cluster, on, FLAT) for i in (0, 2)]
    assert seconds(lines, cluster, on, FLAT) < sum(apart)


def test_replicas_share_their_history():
    """In the second step each serves the random text that the other has served in the first."""
    first, second, *others = noise()
    steps = enumerate((noise(), [second, first, *others]))
    lines = [dataclasses.replace(one, step=step) for step, part in steps for one in part]
    configs = [SpecConfig(batch_threshold=64, history=history) for history in (0, 8)]
    without, shared = (seconds(lines, Cluster(2, 64), config, FLAT) for config in configs)
    assert shared < 0.7 * without
    assert (comes_back(lines), comes_back(noise())) == (True, False)


@pytest.mark.parametrize("times", [FLAT, STEPPED, DEAR], ids=["flat", "stepped", "dear"])
def test_auto_is_as_good_as_the_best_fixed_threshold_and_loses_nothing_where_nothing_repeats(times):
    for lines, thresholds, least in ((rollouts(12), (0, 1, 2, 4, 8, 16), 0.97), (noise(), (0,), 0.98)):
        configs = [SpecConfig(batch_threshold=threshold) for threshold in (*thresholds, "auto")]
        *fixed, auto = (seconds(lines, Cluster(1, 16, None), config, times) for config in configs)
        assert auto < min(fixed) / least


def test_step_times_are_read_from_text_and_from_the_bench(tmp_path):
    times = StepTimes.parse("8:0.1, 16:0.2")
    found = [times.seconds(num_tokens, num_tokens == 12) for num_tokens in (4, 12, 32)]
    assert found == pytest.approx([0.1, 0.15, 0.4])
    file = tmp_path / "engine.json"
    points = [
        {"num_tokens": 1, "seconds": 0.1, "num_steps": 9, "drafted": False},
        {"num_tokens": 1, "seconds": 0.3, "num_steps": 2, "drafted": True},
    ]
    file.write_text(json.dumps({"step_times": points}))
    times = StepTimes.parse(str(file))
    assert (times.seconds(7, False), times.seconds(7, True)) == (0.1, 0.3)
    points[0]["num_steps"] = 0
    wrong = ('{"step_times": [{"num_tokens": 1}]}', '{"step_times": []}', json.dumps({"step_times": points}))
    for content in ("", "[]", "{}", *wrong):
        file.write_text(content)
        with pytest.raises(UserError, match="step"):
            StepTimes.parse(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "neither a file nor tokens:seconds") for text in ("", "8", "8:x", "8:1,")),
        *((text, "tokens from 1 and seconds from") for text in ("0:1", "nan:1", "8:1,nan:1", "inf:1")),
        *((f"1:{s},2:1", "seconds from 1e-09 to 1e.06") for s in ("-1", "inf", "1e-300", "1e300")),
        *((text, "8 tokens have more than one time") for text in ("8:1,8:2", "1:1,8:2,9:3,8:2")),
    ],
)
def test_step_times_that_cannot_be(text, message):
    with pytest.raises(UserError, match=f"step times.*{message}"):
        StepTimes.parse(text)


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("1:0.1", "there is one point, so more tokens take no more time"),
        ("1:0.02,8:0.01,9:0.03", "more tokens take less time; this is taken for noise, and averaged"),
        ("64:21,1:20", "1:20 is an unlikely time: is the table in seconds?"),
        ("1:2e-05,64:3e-05", "1:2e-05 is an unlikely time: is the table in seconds?"),
        ("1:0.02,64:21", None),
    ],
)
def test_unlikely_step_times_are_used_and_one_line_says_why(caplog, text, doubt):
    StepTimes.parse(text)
    assert caplog.messages == ([f"step times: {doubt}"] if doubt else [])
