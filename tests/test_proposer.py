"""vLLM's proposer on a fake engine: requests come, wait, go on, end, fail. The drafter is the real one."""

import types
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker import gpu_model_runner

from rollout_spec.drafting.gate.step import Work
from rollout_spec.drafting.history import prompt_key
from rollout_spec.metrics import EngineCounters
from rollout_spec.vllm.keys import GROUP_KEY, GROUP_TOKENS_KEY
from rollout_spec.vllm.options import engine_options
from rollout_spec.vllm.proposing import control, kept_counters
from rollout_spec.vllm.proposing.control import Ended, ProposerControl
from rollout_spec.vllm.proposing.live_requests import max_level_of
from rollout_spec.vllm.proposing.other_ranks import OtherRanks, most_tokens
from rollout_spec.vllm.proposing.proposer import BatchProposer
from tests.native.checks import check_index
from tests.vllm_doubles import NUM_ROWS, vllm_config

NUM_COLUMNS = 200
PROMPT = [1, 2, 3]
TEXT = list(range(10, 60))
Value = types.SimpleNamespace


class EngineOfRows:
    """As much of vLLM's as the proposer sees: requests, a batch of rows, and drafts that are verified."""

    def __init__(self, parallel=types.MappingProxyType({}), **options):
        config = vllm_config(options, **parallel)
        self.requests: dict[str, Any] = {}  # vLLM's own, in the order in which they came
        self.batch = Value(req_ids=[])
        self.runner = Value(
            vllm_config=config, requests=self.requests, input_batch=self.batch, max_model_len=NUM_COLUMNS
        )
        self.proposer = BatchProposer(self.runner, engine_options(config))
        self.control = ProposerControl(self.proposer)
        self.texts: dict[str, list[int]] = {}  # what each request has, prompt included
        self.drafts: dict[str, list[int]] = {}  # to be verified in its next step

    def add(self, name, prompt=PROMPT, max_tokens=None, extra_args=None):
        params = Value(max_tokens=max_tokens, extra_args=extra_args, eos_token_id=None, stop_token_ids=[])
        self.requests[name] = Value(prompt_token_ids=prompt, sampling_params=params)
        self.texts[name], self.drafts[name] = list(prompt), []
        self.resume(name)

    def resume(self, name):
        self.batch.req_ids.append(name)

    def preempt(self, name):
        """It leaves the batch, and another row may take its place; the engine keeps the request."""
        self.batch.req_ids.remove(name)
        self.drafts[name] = []

    def finish(self, name):
        self.preempt(name)
        del self.requests[name]

    def say(self, name, text):
        """What the request gets in a step: as much of its draft as is right, and a token of the target's."""
        said = len(self.texts[name]) - len(self.requests[name].prompt_token_ids)
        num = 0
        while num < len(self.drafts[name]) and self.drafts[name][num] == text[said + num]:
            num += 1
        return text[said : said + num + 1]

    def step(self, said=None):
        """One step of all rows, each saying TEXT unless `said` has its tokens; returns the drafts."""
        said = said or {}
        tokens = [said[name] if name in said else self.say(name, TEXT) for name in self.batch.req_ids]
        matrix = np.full((NUM_ROWS, NUM_COLUMNS), -7, np.int32)
        levels = np.full(NUM_ROWS, -7, np.int32)
        for row, (name, given) in enumerate(zip(self.batch.req_ids, tokens, strict=True)):
            self.texts[name] += given
            matrix[row, : len(self.texts[name])] = self.texts[name]
            levels[row] = len(self.texts[name])
        drafts = self.proposer.propose(tokens, levels, matrix, slot_mappings=None)
        of_rows = dict(zip(self.batch.req_ids, drafts, strict=True))
        self.drafts |= of_rows
        return of_rows

    @property
    def index(self):
        return self.proposer.drafter.index  # type: ignore[union-attr]


def engine_of_one(**options):
    """It has served "a" the first nine tokens of TEXT."""
    engine = EngineOfRows(min_survival=0.0, **options)
    engine.add("a")
    engine.step({"a": TEXT[:9]})
    return engine


@pytest.fixture
def said(monkeypatch):
    messages: list[str] = []
    note = lambda message, *args: messages.append(message % args)  # noqa: E731
    for module in (kept_counters, control):
        monkeypatch.setattr(module, "logger", Value(exception=note, warning=note, info=lambda *_: None))
    return messages


def test_a_request_with_the_id_of_one_that_has_just_ended_is_another_one():
    engine = EngineOfRows(min_survival=0.0)
    engine.add("a")
    for _ in range(5):
        engine.step()
    engine.finish("a")
    engine.add("a", [70, 71, 72, 73] * 3)
    assert engine.step({"a": [70]})["a"] == [71, 72, 73, 70]
    engine.finish("a")
    engine.add("a", [80, 81])  # as many tokens as the other had are still to come
    assert engine.step({"a": [82]}) == {"a": []}
    assert engine.proposer.take_counters().num_failed_steps == 0


@pytest.mark.parametrize(
    ("end", "num_kept"), [({}, 25), ({"eos_token_id": 32}, 23), ({"stop_token_ids": [31, 33]}, 22)]
)
def test_nothing_is_learned_from_behind_an_end(end, num_kept):
    """A step can accept draft tokens that come after the token which ends the request."""
    engine = EngineOfRows(history=8)
    engine.add("a")
    vars(engine.requests["a"].sampling_params).update(end)
    for said in (TEXT[:20], TEXT[20:25]):
        engine.step({"a": said})
    assert engine.proposer.take_counters().num_accepted_tokens == 19 + num_kept - 21
    engine.finish("a")
    engine.step()
    [response] = engine.proposer.drafter.history.get(prompt_key(np.array(PROMPT, np.int32)))  # type: ignore
    assert response.tolist() == TEXT[:num_kept]


def test_drafts_belong_to_their_rows_whatever_comes_and_goes():
    """Three groups, whose texts differ; rows change places as requests leave, wait and come back."""
    engine = EngineOfRows(min_survival=0.0)
    chooser = np.random.default_rng(0)
    serial = num_rows = num_said = 0
    for _ in range(150):
        if len(engine.batch.req_ids) < NUM_ROWS and chooser.random() < 0.5:
            group = serial % 3
            engine.add(f"{group}-{serial}", [1, 2, group])
            serial += 1
        if engine.batch.req_ids and chooser.random() < 0.3:
            name = str(chooser.choice(engine.batch.req_ids))
            (engine.finish if chooser.random() < 0.6 else engine.preempt)(name)
        waiting = [name for name in engine.requests if name not in engine.batch.req_ids]
        if waiting and len(engine.batch.req_ids) < NUM_ROWS and chooser.random() < 0.5:
            engine.resume(str(chooser.choice(waiting)))
        for name in [each for each in engine.batch.req_ids if len(engine.texts[each]) > 40]:
            engine.finish(name)
        chooser.shuffle(engine.batch.req_ids)
        texts = {name: [100 * (int(name[0]) + 1) + i for i in range(60)] for name in engine.batch.req_ids}
        tokens = {name: engine.say(name, text) for name, text in texts.items()}
        num_rows, num_said = num_rows + len(tokens), num_said + sum(map(len, tokens.values()))
        for name, draft in engine.step(tokens).items():
            said = len(engine.texts[name]) - 3
            assert draft == texts[name][said : said + len(draft)]
        assert engine.proposer.drafter.request_ids == engine.requests.keys()  # type: ignore[union-attr]
    counters = engine.proposer.take_counters()
    assert serial > 30 and counters.num_accepted_tokens > 200
    assert (counters.num_row_steps, counters.num_accepted_tokens) == (num_rows, num_said - num_rows)
    assert counters.num_draft_tokens >= counters.num_accepted_tokens
    assert counters.num_failed_steps == counters.num_untracked_rows == 0
    assert engine.proposer.take_counters() == EngineCounters()
    assert engine.index.stats().num_sequences == len(engine.requests)
    check_index(engine.index)


def test_a_prompt_of_embeddings_has_drafts():
    """Its tokens are known to nobody, and its length counts."""
    engine = EngineOfRows(min_survival=0.0)
    engine.add("embeddings", max_tokens=20)
    request = engine.requests["embeddings"]
    request.prompt_embeds, request.prompt_token_ids = np.zeros((len(PROMPT), 8)), None
    said = TEXT[:4] * 3
    for token in said:
        drafts = engine.step({"embeddings": [token]})
    assert drafts["embeddings"][:2] == TEXT[:2]
    assert max_level_of(request, 1000) == len(PROMPT) + 20 and max_level_of(request, 21) == 21


@pytest.mark.parametrize(("max_tokens", "model_len"), [(6, 200), (None, 9), (50, 9), (7, 9)])
def test_a_draft_ends_before_the_request(max_tokens, model_len):
    """One short of max_tokens or of the model's length, which vLLM may set after the proposer is made."""
    engine = EngineOfRows(min_survival=0.0)
    engine.runner.max_model_len = model_len
    engine.add("a")
    engine.step({"a": TEXT[:8]})
    engine.runner.max_model_len = NUM_COLUMNS if max_tokens == 6 else model_len
    engine.add("b", max_tokens=max_tokens)
    # After the first token there are five more, of which the target adds the last one by itself.
    assert [len(engine.step({"b": TEXT[i : i + 1]})["b"]) for i in range(6)] == [4, 3, 2, 1, 0, 0]


def drafts_of(history, group):
    """What a new engine with this history drafts after the first two tokens of the group's text."""
    assert history is not None
    engine = EngineOfRows(min_survival=0.0, history=4)
    engine.control.add_history([history])
    engine.add("new", extra_args={GROUP_KEY: group})
    return engine.step({"new": TEXT[:2]})["new"]


def test_new_weights_leave_the_text_and_the_history_keeps_what_was_said():
    engine = EngineOfRows(min_survival=0.0, history=4)
    for name in ("done-0123abcd", "cut-0123abcd"):
        engine.add(name, extra_args={GROUP_KEY: name.split("-")[0]})
    engine.step({"done-0123abcd": TEXT[:9], "cut-0123abcd": TEXT[:9]})
    engine.control.note_new_weights(Ended(["cut"], ["done"]))  # by the names that their sender gave them
    stats = engine.index.stats()
    assert (stats.num_sequences, stats.num_groups, stats.num_tokens) == (0, 2, 2 * (len(PROMPT) + 9))
    content = engine.control.pack_history()
    assert drafts_of(content, "done") == TEXT[2:6]
    assert drafts_of(content, "cut") == TEXT[2:6], "it goes on there"


def test_the_history_is_taken_once_and_of_what_has_ended():
    engine = EngineOfRows(min_survival=0.0, history=4)
    names = ("done", "cut", "runs")
    for name in names:
        engine.add(f"{name}-0123abcd", extra_args={GROUP_KEY: name})
    engine.step({f"{name}-0123abcd": TEXT[:9] for name in names})
    taken = engine.control.take_history(Ended(["cut"], ["done"]))
    assert engine.index.stats().num_sequences == 1
    assert [drafts_of(taken, name) for name in names] == [TEXT[2:6], [], []]
    again = engine.control.take_history(Ended((), []))
    assert [drafts_of(again, name) for name in names] == [[], [], []]
    # By default all have ended; `pack_history` has what was taken before, too.
    content = engine.control.pack_history()
    assert [drafts_of(content, name) for name in names] == [TEXT[2:6]] * 3
    assert engine.index.stats().num_sequences == 0


def test_a_name_ends_no_request_whose_name_goes_on_after_it():
    """vLLM adds nothing to a name with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1."""
    engine = EngineOfRows()
    for name in ["a", "a-b", "a-0123abcd", "a-b-0123abcd"]:
        engine.add(name)
    engine.step()
    engine.control.note_ended(Ended(["a"], ()))
    assert list(engine.proposer.drafter.request_ids) == ["a-b", "a-b-0123abcd"]


def test_a_history_that_cannot_be_read_costs_itself(said):
    engine, other = (EngineOfRows(history=4, min_survival=0.0) for _ in range(2))
    engine.add("a", extra_args={GROUP_KEY: "g"})
    engine.step({"a": TEXT[:9]})
    engine.finish("a")
    other.control.add_history([b"nothing of ours", engine.control.pack_history()])
    assert drafts_of(other.control.pack_history(), "g") == TEXT[2:6]
    assert len(said) == 1 and "without a part of the history" in said[0]


def test_what_is_on_its_way_is_received_first():
    """With MRV2 the tokens of the last steps arrive late: whoever ends a step waits for them."""
    engine = EngineOfRows(history=4, min_survival=0.0)
    received: list[str] = []
    for name in ("take_counters", "note_new_weights", "take_history", "pack_history"):
        engine.proposer.index_arrivals = lambda name=name: received.append(name)
        getattr(engine.control, name)()
    assert received == ["take_counters", "note_new_weights", "take_history", "pack_history"]


def test_of_a_warm_up_nothing_is_left():
    engine = EngineOfRows(history=4)
    with pytest.raises(ZeroDivisionError), engine.proposer.warming_up():
        _ = 1 // 0
    with engine.proposer.warming_up():
        engine.add("warm-up")
        for _ in range(9):
            engine.step()
            engine.proposer.note_passes(1)
        engine.finish("warm-up")
        engine.step()
    assert engine.proposer.take_counters() == EngineCounters()
    assert engine.index.stats().num_groups == 0
    assert engine.control.pack_history() == EngineOfRows(history=4).control.pack_history()
    engine.add("a")
    engine.step()
    assert engine.proposer.take_counters().num_steps == 1


def test_a_failing_step_costs_its_drafts_and_is_said_once(said):
    engine = engine_of_one()
    engine.add("b")
    engine.step({"a": [], "b": TEXT[:1]})
    for _ in range(2):
        matrix = np.zeros((NUM_ROWS, NUM_COLUMNS), np.int32)
        assert engine.proposer.propose([[1], [1]], np.array([4], np.int32), matrix) == [[], []]
    assert engine.step()["b"] == TEXT[6:10]
    assert engine.proposer.take_counters().num_failed_steps == 2
    [message] = said
    assert "this step goes without drafts: request_ids: has 2 entries" in message
    assert "num_failed_steps" in message


def test_an_error_while_the_device_works_costs_drafts_only(said):
    engine = engine_of_one()
    engine.proposer.drafter.catch_up = lambda has_time: 1 // 0
    engine.proposer.catch_up(lambda: True)
    assert engine.step() == {"a": []} and "ZeroDivisionError" in said[0]
    assert engine.proposer.take_counters().num_failed_steps == 2


def test_an_error_that_nobody_knows_turns_drafting_off_and_not_the_engine(said):
    engine = engine_of_one(history=4)
    engine.batch.req_ids.append("stranger")
    engine.texts["stranger"], engine.drafts["stranger"] = [5], []
    assert engine.step({"a": [9], "stranger": [6]}) == {"a": [], "stranger": []}
    engine.batch.req_ids.remove("stranger")
    assert engine.step() == {"a": []}
    counters = engine.proposer.take_counters()
    assert (counters.num_steps, counters.num_failed_steps) == (1, 2)
    [message] = said
    assert "drafting is off for the rest of this engine's life: KeyError('stranger')" in message
    # What the trainer asks of the engine goes on.
    engine.control.note_new_weights(Ended(["a"]))
    engine.control.add_history([b""])
    assert engine.control.take_history() is None
    assert engine.control.pack_history() is None
    assert engine.proposer.take_counters().num_steps == 0


@pytest.mark.parametrize(
    "extra_args",
    [None, "text", {GROUP_TOKENS_KEY: 2}, {GROUP_KEY: "\ud800"}, {GROUP_KEY: "g", GROUP_TOKENS_KEY: 1 << 40}],
    ids=["none", "a text", "no group", "no text", "a long prompt"],
)
def test_whatever_a_caller_sends_all_draft(extra_args):
    engine = engine_of_one()
    engine.add("strange", extra_args=extra_args)
    engine.add("b")
    assert engine.step(dict.fromkeys(("strange", "b"), TEXT[:1]))["b"] == TEXT[1:5]
    assert engine.proposer.take_counters().num_failed_steps == 0
    for name in list(engine.batch.req_ids):
        engine.finish(name)
    engine.add("c")
    assert engine.step()["c"] == TEXT[1:5]


@pytest.mark.parametrize(
    ("parallel", "drafts_here"),
    [
        ({"rank": 1, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, False),
        ({"rank": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, True),
        ({"rank": 1, "tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, True),
    ],
)
def test_only_the_worker_whose_drafts_are_taken_drafts(parallel, drafts_here):
    engine = EngineOfRows(parallel, history=4, min_survival=0.0)
    engine.add("a", [5, 6, 5, 6])
    vars(engine.requests["a"]).update(prompt_token_ids=None, sampling_params=None)  # embeddings
    engine.runner.max_model_len = 9
    assert engine.step({"a": [5]}) == {"a": [6, 5, 6] if drafts_here else []}
    assert engine.proposer.take_counters().num_steps == drafts_here
    assert (engine.control.take_history() is not None) == drafts_here


@pytest.mark.parametrize(("own", "padded", "most"), [(9, 16, 9), (9, 24, 24), (25, 25, 25), (25, 31, 31)])
def test_what_fills_a_ranks_graph_is_not_verified(own, padded, most):
    assert most_tokens(own, padded, graphs=[24, 16, 8]) == most


def test_each_engine_of_a_process_hears_of_its_own_ranks(monkeypatch):
    both = lambda num_tokens_unpadded, parallel_config: (False, torch.tensor([num_tokens_unpadded, 31]))  # noqa: E731
    monkeypatch.setattr(gpu_model_runner, "coordinate_batch_across_dp", both)
    watching = []
    for _ in range(2):
        config = vllm_config({})
        runner = Value(vllm_config=config, parallel_config=config.parallel_config)
        watching.append((OtherRanks(runner), runner.parallel_config))
        watching[-1][0].watch()
    for num_own, (_, parallel_config) in zip((25, 40), watching, strict=True):
        gpu_model_runner.coordinate_batch_across_dp(num_own, parallel_config=parallel_config)
    own = Work(25, 3, True)
    assert [each.of_busiest(own) for each, _ in watching] == [Work(31, 3, True, 1), Work(40, 3, True, 1)]
