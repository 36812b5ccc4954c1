"""MRV2's tokens come to the host, drafts go to the device, and models draft there: on a fake accelerator."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu import model_runner as mrv2
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout_spec import patches
from rollout_spec.drafting.drafts import Drafts, StepsToCome
from rollout_spec.verification import coupled, noise
from rollout_spec.vllm.mrv1.runner import bind_model_drafter
from rollout_spec.vllm.mrv2 import host_drafts, speculators
from rollout_spec.vllm.mrv2.arrivals import Arrival
from rollout_spec.vllm.mrv2.host_drafts import SPECULATOR, HostDrafts
from rollout_spec.vllm.mrv2.runner import DraftingRunner, WaitingTables
from rollout_spec.vllm.mrv2.speculators import gumbel
from rollout_spec.vllm.options import engine_options
from rollout_spec.vllm.step_notes import Plan, Report, attach, report_of
from tests import vllm_doubles as doubles
from tests.accelerator import DEVICE, Accelerator
from tests.drawn import keyed_sample
from tests.vllm_doubles import VOCAB_SIZE, K, Samplers, bare, flat, vllm_config, vllm_on_a_gpu  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("vllm_on_a_gpu", "one_device")
NOTHING = SimpleNamespace(wait_stream=lambda _: None, record=lambda *_: None, synchronize=lambda: None)


@pytest.fixture
def one_device(monkeypatch):
    """Its streams wait for nothing, and no other rank hears of what it drafts."""
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: NOTHING)
    monkeypatch.setattr(async_utils, "stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(host_drafts, "get_tp_group", lambda: SimpleNamespace(broadcast_object=lambda x: x))


TEXT = [5, 6, 7, 8, 5, 6, 7, 8, 5]


class SomeTables(BlockTables):
    def apply_staged_writes(self):
        self.log.append("tables")


class SomeMRV2(mrv2.GPUModelRunner):
    def execute_model(self, scheduler_output):
        self.add_requests(scheduler_output)
        self.update_requests(scheduler_output)
        self.block_tables.apply_staged_writes()
        self.launch()
        self.executed = scheduler_output

    def launch(self): ...
    def add_requests(self, scheduler_output): ...
    def update_requests(self, scheduler_output): ...
    def sample_tokens(self, grammar_output):
        names, tokens, nums = self.sampled
        output = SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None, num_nans=None)
        said = ModelRunnerOutput(names, {}, prompt_logprobs_dict={})
        return async_utils.AsyncOutput(said, output, nums, NOTHING, NOTHING)


def mrv2_host(accelerator, rows):
    config = vllm_config({"min_survival": 0.0})
    runner = bare(
        SomeMRV2, vllm_config=config, max_num_reqs=4, max_model_len=64, output_copy_stream=NOTHING,
        parallel_config=config.parallel_config, device=DEVICE, block_tables=bare(SomeTables, log=[]),
        req_states=SimpleNamespace(
            req_id_to_index=rows, num_computed_tokens_np=np.zeros(4, np.int32),
            draft_tokens=accelerator.put(torch.zeros(4, K, dtype=torch.int64)),
        ),
    )  # fmt: skip
    runner.host_drafts = runner.block_tables.host_drafts = HostDrafts(runner, engine_options(config))
    runner.max_model_len = 48  # as by max_model_len=-1, once vLLM knows its memory
    patches.put_before(DraftingRunner, runner, SPECULATOR)
    patches.put_before(WaitingTables, runner.block_tables, SPECULATOR)
    return runner


def scheduled(new=(), drafts=None):
    """A step of vLLM's scheduler, in which these requests are new."""
    common = {"prompt_token_ids": TEXT, "prefill_token_ids": TEXT, "sampling_params": None}
    requests = [SimpleNamespace(req_id=name, **common) for name in new]
    nums = {name: 1 + len(tokens) for name, tokens in (drafts or {}).items()}
    return SimpleNamespace(
        finished_req_ids=(), preempted_req_ids=(), scheduled_new_reqs=requests,
        scheduled_spec_decode_tokens=drafts or {},
        num_scheduled_tokens=nums, total_num_scheduled_tokens=sum(nums.values()),
    )  # fmt: skip


def planned(output, plan, names):
    """It with room for drafts in some of these requests, and the plan of it."""
    room = output.scheduled_spec_decode_tokens
    output.num_scheduled_tokens = {name: 1 + len(room.get(name, ())) for name in names}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    attach(output, plan)
    return output


def after_sampling(runner, put, names, sampled):
    """Each request has got one token; the step's output."""
    tokens = put(torch.tensor([[token] + [0] * K for token in sampled]))
    runner.sampled = names, tokens, put(torch.ones(len(names)).int())
    return runner.sample_tokens(None)


def test_drafts_of_mrv2_go_to_the_host_and_back():
    """A step's tokens come from the device, and what is drafted goes there, without a wait."""
    with Accelerator() as accelerator:
        runner = mrv2_host(accelerator, {"a": 2, "b": 0})
        runner.execute_model(scheduled(("a", "b")))
        accelerator.start()
        after_sampling(runner, accelerator.put, ["b", "a"], [6, 6])
        nothing = runner.host_drafts.no_drafts(SimpleNamespace(num_reqs=2))
        given = runner.host_drafts.for_scheduler.get_draft_tokens()
        drafts = dict(zip(*dataclasses.astuple(given), strict=True))
        runner.execute_model(planned(scheduled(drafts=drafts), Plan(0), ["a", "b"]))
    assert nothing.value.shape == (2, K) and runner.host_drafts.step.num_model_tokens == 0
    assert drafts["a"] == drafts["b"] == [7, 8, 5, 6]
    assert runner.req_states.draft_tokens.value.tolist() == [drafts["b"], [0] * K, drafts["a"], [0] * K]
    assert (accelerator.waits, accelerator.num_sent) == ([], 1)


def test_a_step_of_mrv2_that_is_there_gets_its_drafts_and_loses_the_room_that_stays_empty():
    """Without a wait but for the tokens of the step before. The scheduler's own output stays as it is."""
    names = ["b", "a", "new"]
    with Accelerator() as accelerator:
        runner = mrv2_host(accelerator, {name: row for row, name in enumerate(names)})
        runner.execute_model(planned(scheduled((*names,)), Plan(None, 0, K), names))
        assert not runner.host_drafts.proposer.busiest_work.has_drafts, "in their prompts no row had room"
        accelerator.start()
        after_sampling(runner, accelerator.put, names, [6, 6, 40])
        room = {"b": [-1] * 2, "a": [-1] * K, "new": [-1] * K}
        given = planned(scheduled(drafts=dict(room)), Plan(None, 1, K), names)
        runner.execute_model(given)
        report = report_of(runner.sample_tokens(None).model_runner_output)
    drafts = {"b": [7, 8], "a": [7, 8, 5, 6]}
    assert runner.executed.scheduled_spec_decode_tokens == drafts
    assert runner.host_drafts.proposer.busiest_work.has_drafts
    nums = runner.executed.num_scheduled_tokens
    assert nums == {"b": 3, "a": 5, "new": 1} and runner.executed.total_num_scheduled_tokens == 9
    assert given.scheduled_spec_decode_tokens == room and given.total_num_scheduled_tokens == 13
    assert report == Report(0, {"b": 2, "a": 4}, True)
    placed = runner.req_states.draft_tokens.value.tolist()
    assert placed[0][:2] == drafts["b"] and placed[1] == drafts["a"]
    assert (accelerator.waits, accelerator.num_sent) == ([], 1)


def test_what_needs_no_drafts_goes_to_the_device_before_the_wait_for_them(monkeypatch):
    """Once a step. And vLLM makes lists of the tokens when the step that waits for them has been launched."""
    with Accelerator() as accelerator:
        runner = mrv2_host(accelerator, {"a": 0})
        log, wait = runner.block_tables.log, Arrival.wait
        monkeypatch.setattr(Arrival, "wait", lambda *args: (log.append("wait"), wait(*args))[1])
        runner.execute_model(planned(scheduled(("a",)), Plan(None, 0, 0), ["a"]))
        output = after_sampling(runner, accelerator.put, ["a"], [6])
        thread = threading.Thread(target=lambda: log.append(output.get_output().sampled_token_ids))

        def launch():
            thread.start()
            thread.join(0.1)  # time enough if nothing holds it
            log.append("launch")

        runner.launch = launch
        runner.execute_model(planned(scheduled(drafts={"a": [-1] * K}), Plan(None, 1, K), ["a"]))
        thread.join()
    assert log == ["tables", "tables", "wait", "launch", [[6]]]


def test_nothing_is_learned_from_behind_an_end_on_mrv2_either():
    with Accelerator() as accelerator:
        runner, put = mrv2_host(accelerator, {"a": 0}), accelerator.put
        first = planned(scheduled(("a",)), Plan(None, 0, 0), ["a"])
        ends = SimpleNamespace(eos_token_id=8, stop_token_ids=[], max_tokens=None, extra_args=None)
        first.scheduled_new_reqs[0].sampling_params = ends
        runner.execute_model(first)
        after_sampling(runner, put, ["a"], [6])
        runner.execute_model(planned(scheduled(drafts={"a": [-1] * K}), Plan(None, 1, K), ["a"]))
        runner.sampled = ["a"], put(torch.tensor([[7, 8, 5, 6, 7]])), put(torch.tensor([5]).int())
        runner.sample_tokens(None)
        assert runner.host_drafts.proposer.take_counters().num_accepted_tokens == 1


def test_the_host_knows_how_far_rows_are_that_had_room_in_the_step_before():
    """Attention that decodes rows of one length only computes the others from what the host counts."""
    names = ["drafted", "plain", "chunk"]

    def step(output, plan, counted):
        runner.req_states.num_computed_tokens_np[:3] = counted  # by the scheduler, and more on the fourth row
        runner.execute_model(planned(output, plan, names))
        return runner.req_states.num_computed_tokens_np[:3].tolist()

    with Accelerator() as accelerator:
        runner = mrv2_host(accelerator, {name: row for row, name in enumerate(names)})
        step(scheduled((*names,)), Plan(None, 0, 0), 0)
        accelerator.start()
        after_sampling(runner, accelerator.put, names[:2], [6, 40])
        known, room = len(TEXT), {"drafted": [-1] * K, "plain": [-1] * K}
        counted = [known + K, known + 1, 4]
        assert step(scheduled(drafts=room), Plan(None, 1, K), counted) == [known, known, 4]
        after_sampling(runner, accelerator.put, names[:2], [41, 42])
        counted = [known + 1 + K, known + 1 + K, 4]
        assert step(scheduled(drafts=room), Plan(None, 1, K), counted) == [known + 1, known + 1, 4]
        assert not runner.executed.scheduled_spec_decode_tokens, "41 and 42 say nothing of what comes next"


@pytest.mark.parametrize("fails", ["change", "extend"])
def test_where_the_host_has_failed_no_draft_and_no_length_follows_from_it(fails, monkeypatch):
    with Accelerator() as accelerator:
        runner = mrv2_host(accelerator, {"a": 0, "new": 1})
        room, rows = {"a": [-1] * K}, runner.req_states.num_computed_tokens_np
        runner.execute_model(planned(scheduled(("a",)), Plan(None, 0, 0), ["a"]))
        after_sampling(runner, accelerator.put, ["a"], [6])
        runner.execute_model(planned(scheduled(drafts=room), Plan(None, 1, K), ["a"]))
        output = after_sampling(runner, accelerator.put, ["a"], [7])
        assert report_of(output.model_runner_output).drafts_wanted
        monkeypatch.setattr(f"rollout_spec.vllm.mrv2.host_batch.HostBatch.{fails}", lambda *_: 1 // 0)
        rows[:2] = 20
        runner.execute_model(planned(scheduled(("new",), room), Plan(None, 1, K), ["a", "new"]))
        report = report_of(runner.sample_tokens(None).model_runner_output)
    assert rows.tolist()[:2] == [20, 20] and report == Report(0, {}, False)
    assert runner.executed.num_scheduled_tokens == {"a": 1, "new": 1}


class SomeMRV1(GPUModelRunner):
    def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, *_):
        return self.drafter.propose(num_speculative_tokens=2)

    def sample_tokens(self, grammar_output):
        self.propose_draft_token_ids(None, self.sampled)
        return SimpleNamespace(req_ids=["0", "1", "2"], sampled_token_ids=[[5], [6], [7, 8]])


class SomeDrafter(SpecDecodeBaseProposer):
    def propose(self, num_speculative_tokens):
        passes = range(num_speculative_tokens)
        return torch.stack([self._sample_draft_tokens(self.logits, self.sampling)[0] for _ in passes], 1)


def with_model(engine, proposer=None):
    """A model drafts two tokens for each row of MRV1, of flat logits: alone, or beside the text."""
    config, put = vllm_config({}), engine.accelerator.put
    logits, model = put(flat(3, VOCAB_SIZE).contiguous()), SimpleNamespace(compute_logits=lambda x: x)
    runner = bare(
        SomeMRV1, drafter=bare(SomeDrafter, logits=logits, sampling=engine.sampling, model=model),
        vllm_config=config, parallel_config=config.parallel_config, max_model_len=64,
        input_batch=SimpleNamespace(**vars(engine.runner.input_batch), token_ids_cpu=None),
        sampled=put(torch.tensor([[5, -1], [6, -1], [7, 8]])),
    )  # fmt: skip
    bind_model_drafter(runner, engine.row_sampling, proposer)
    if proposer is None:
        return engine.counted(lambda: runner.propose_draft_token_ids(None, runner.sampled))
    runner.rollout_spec_proposer = proposer
    return engine.counted(lambda: runner.sample_tokens(None))


@pytest.mark.parametrize("temperature", [doubles.GREEDY, doubles.SOME_GREEDY, doubles.SAMPLED])
def test_a_model_on_mrv1_drafts_with_the_noise_of_the_target(temperature):
    """What it draws on the device is what the target draws at these positions from the same logits."""
    engine = Samplers(temperature)
    accelerator, drafts = with_model(engine), engine.output.value.tolist()
    keys = torch.tensor([noise.make_key("arrival", 0, number) for number in (1, 2, 3)])
    hot, ends = torch.tensor(temperature), torch.tensor([9 + 1, 10 + 1, 11 + 2])
    logits = flat(3, VOCAB_SIZE).contiguous()
    for number in range(2):
        drawn = keyed_sample(logits / hot.clamp(min=1e-9).unsqueeze(1), keys, ends + number)
        assert [row[number] for row in drafts] == torch.where(hot > 0, drawn, logits.argmax(dim=-1)).tolist()
    # The rows' keys go to the device in one copy; each pass with a sampled row has its race.
    races = [doubles.RACE] * 2 if any(temperature) else []
    assert (accelerator.waits, accelerator.num_sent) == (races, 1)
    given: list[Any] = []
    beside = SimpleNamespace(
        drafts_here=True, most_model_tokens=2, busiest_work=None, note_passes=lambda *_: None,
        to_come=StepsToCome(),
        draft=lambda *each, **__: given.append(each[-2]) or Drafts.none(3),
    )  # fmt: skip
    accelerator = with_model(Samplers(temperature), beside)
    assert given[0].tokens.tolist() == drafts
    assert np.isfinite(given[0].log_odds).all()
    fetched = "rollout_spec.vllm.mrv1.proposers.<genexpr>"
    assert (accelerator.waits, accelerator.num_sent) == ([*races, fetched, fetched], 1)


def test_a_model_on_mrv2_leaves_its_log_odds_on_the_device(monkeypatch):
    accelerator, logits = Accelerator(), torch.randn(3, VOCAB_SIZE)
    put = accelerator.put
    monkeypatch.setattr(gumbel, "gumbel_sample", lambda given, *_, **__: given.argmax(dim=-1))  # Triton's
    model = SimpleNamespace(compute_logits=lambda x: x)
    speculator = bare(EagleSpeculator, model=model, use_fp64_gumbel=False)
    speculator.log_odds = log_odds = put(torch.zeros(4, 2))
    with accelerator:
        patches.put_before(speculators.SharedNoiseModel, speculator, speculators.SHARED_NOISE)
        accelerator.start()
        rows, step, ones = put(torch.arange(3)), put(torch.tensor(1)), put(torch.ones(3))
        tokens = speculator.sample_draft(put(logits), rows, rows, ones, rows, step)
    assert (accelerator.waits, accelerator.num_sent) == ([], 0)
    assert torch.equal(tokens.value, logits.argmax(dim=-1))
    expected = torch.zeros(4, 2)
    expected[:3, 1] = coupled.log_odds(logits, logits.argmax(dim=-1))
    assert torch.allclose(log_odds.value, expected)
