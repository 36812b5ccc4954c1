"""A simulated device: its clock, what it verifies, its requests; bad input, before a process starts."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.tests.conftest import DATA
from rollout_spec.config import UserError
from rollout_spec.trace import Rollout, to_line
from rollout_spec_lab.bench.host import Cell, HostPlan, cell_requests, make_record, split
from rollout_spec_lab.bench.host_device import Clock, Event
from rollout_spec_lab.bench.load import first_rollout, one_rollout
from rollout_spec_lab.bench.recorded import Recorded
from rollout_spec_lab.bench.tables import host_tables
from rollout_spec_lab.cli import main

TRACE = str(DATA / "demo_trace.jsonl.gz")


class Cpu:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_step_begins_when_the_device_is_free_and_it_is_asked_for() -> None:
    cpu = Cpu()
    clock = Clock(cpu)
    clock.submit(4.0)
    event = Event(clock)  # of what was given before it
    cpu.seconds += 1
    clock.submit(2.0)  # scheduled ahead: after the first
    assert (clock.free, clock.num_steps, clock.num_ahead) == (106.0, 2, 1)
    event.synchronize()
    assert (clock.now(), clock.host_s()) == (104.0, 101.0)  # to wait is no work
    event.record()
    event.synchronize()
    assert clock.now() == 106.0
    cpu.seconds += 6
    clock.wait(clock.free)  # it is there already
    clock.submit(4.0)
    assert (clock.free, clock.now(), clock.num_ahead) == (116.0, 112.0, 1)


def test_what_a_real_kernel_takes_is_no_work_of_the_host() -> None:
    cpu = Cpu()
    clock = Clock(cpu)

    def kernel(seconds: float) -> str:
        cpu.seconds += seconds
        return "logits"

    assert clock.run(kernel, seconds=3) == "logits"
    assert clock.kernel_s == 3.0 and clock.num_steps == 0
    clock.launch_s += 1
    assert clock.host_s() == clock.now() == 101.0


@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("off", ("off", True)),
        ("off/mrv1", ("off", False)),
        ("off:sync/mrv1", ("off:sync", False)),
        ("sam:0", ("sam:0", True)),
        ("suffix", ("suffix", False)),
        ("ngram", ("ngram", False)),
    ],
)
def test_a_method_has_the_model_runner_that_it_has_on_a_gpu(label: str, found: tuple[str, bool]) -> None:
    assert split(label) == found


@dataclasses.dataclass
class OutputMRV2:
    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor | None = None
    num_rejected: torch.Tensor | None = None


class RunnerMRV2:
    """The parts of a model runner that `Recorded` touches; it samples 99 everywhere."""

    device, num_speculative_steps = torch.device("cpu"), 3

    def update_requests(self, scheduler_output: Any) -> None:
        return None

    def sample(self, hidden: Any, batch: Any, grammar: Any) -> Any:
        return OutputMRV2(torch.full((2, 1), 99)), None, None


RESPONSES = [[10, 11, 12, 13, 14], [20, 21, 22, 23]]
PLAIN = SimpleNamespace(scheduled_spec_decode_tokens={})


def test_on_mrv2_levels_go_by_what_rows_got_and_part_of_a_prompt_gets_nothing() -> None:
    """On MRV1: lab/tests/engine/test_bench.py."""
    runner: Any = RunnerMRV2()
    recorded = Recorded(runner)
    batch = SimpleNamespace(
        req_ids=["1-aaaaaaaa", "0-bbbbbbbb"], num_computed_tokens_np=np.array([0, 0]),
        num_scheduled_tokens=np.array([2, 1]), prefill_len_np=np.array([2, 2]),
    )  # fmt: skip

    def sample(step: Any) -> list[Any]:
        runner.update_requests(step)
        output, sampled, rejected = runner.sample(None, batch, None)
        assert output.num_sampled is sampled and output.num_rejected is rejected
        return [each.tolist() for each in (output.sampled_token_ids, sampled, rejected)]

    recorded.start(RESPONSES)
    assert sample(PLAIN) == [[[20], [-1]], [1, 0], [0, 0]]
    batch.num_computed_tokens_np[:] = 1
    assert sample(PLAIN) == [[[21], [10]], [1, 1], [0, 0]]
    drafts = {"1-aaaaaaaa": [22, 7], "0-bbbbbbbb": [7]}
    tokens = [[22, 23, -1, -1], [11, -1, -1, -1]]
    assert sample(SimpleNamespace(scheduled_spec_decode_tokens=drafts)) == [tokens, [2, 1], [1, 1]]
    recorded.start(None)
    assert runner.sample(None, batch, None)[0].sampled_token_ids.tolist() == [[99], [99]]


def line(step: int | None, *responses: list[int]) -> Rollout:
    arrays = [np.array(each, np.int32) for each in responses]
    return Rollout("g", step, np.array([5, 6], np.int32), arrays)


def test_the_first_rollout_of_a_trace_is_served() -> None:
    lines = [line(4, [1, 2], []), line(4, [3]), line(5, [4])]
    assert [len(each.responses) for each in first_rollout(lines, None)] == [1, 1]
    assert len(first_rollout(lines, 1)) == 1
    for empty in ([], [line(None, [])]):
        with pytest.raises(UserError, match="no token in any response"):
            first_rollout(empty, None)


def test_requests_last_and_say_nothing_of_those_before() -> None:
    """More tokens than four a row and step; siblings share a prompt, copies and cells share no token."""
    lines = [line(None, [1, 2, 3, 4], [1, 2])]
    size = {"rows": 2, "num_steps": 3, "max_tokens": 3, "vocab_size": 151_936}
    cells = [cell_requests(lines, number, **size) for number in (0, 1)]
    for requests in cells:
        assert max(len(response) for _, response in requests) == 3
        assert sum(len(response) for _, response in requests) >= 2 * 3 * 4
        (first, _), (second, _), (copy, _) = requests[:3]
        assert first.tolist() == second.tolist() and not {*first} & {*copy}
    rollout = cell_requests(lines, 0, rows=40, num_steps=None, max_tokens=None, vocab_size=151_936)
    assert [len(response) for _, response in rollout] == [4, 2] * 20
    assert len({prompt.tobytes() for prompt, _ in rollout}) == 20, "copies have tokens of their own"
    prompts = [{token for prompt, _ in requests for token in prompt.tolist()} for requests in cells]
    assert not prompts[0] & prompts[1]
    assert all(0 <= token < 151_936 for token in prompts[1])


def test_a_record_sets_methods_beside_the_first_and_splits_the_host() -> None:
    plan = HostPlan(
        Path(TRACE), None, ["off", "sam"], [Cell(2, "1:0.02", "20 ms")], {}, None, warm_up_steps=1, steps=10,
        max_tokens=9, repeats=3,
    )  # fmt: skip
    run = {
        "num_steps": 10, "seconds": 0.2, "num_tokens": 20, "num_rows": 2.0, "host_s": 0.03, "drafter_s": 0.0,
        "launch_s": 0.01, "num_draft_tokens": 0, "num_accepted_tokens": 0,
    }  # fmt: skip
    drafted = run | {"seconds": 0.25, "num_tokens": 50, "host_s": 0.04, "drafter_s": 0.01}
    drafted |= {"num_draft_tokens": 60, "num_accepted_tokens": 30}
    found = {name: [{"settings": {}, "cells": [each]}] * 2 for name, each in (("off", run), ("sam", drafted))}
    record = make_record(plan, found)
    off, sam = record["results"]
    assert (off["steps_per_s"], off["tokens_per_s"], off["acceptance_rate"]) == (50.0, 100.0, None)
    assert (off["vllm_ms"], off["drafter_ms"]) == pytest.approx((3.0, 0.0))
    assert (sam["vllm_ms"], sam["drafter_ms"]) == pytest.approx((3.0, 1.0))
    assert sam["ratios"]["steps_per_s"]["value"] == pytest.approx(0.8)
    assert sam["ratios"]["tokens_per_s"]["value"] == pytest.approx(2.0)
    assert (sam["draft_tokens_per_step"], sam["acceptance_rate"]) == (6.0, 0.5)
    assert record["plan"]["repeats"] == 2 and json.loads(json.dumps(record, allow_nan=False)) is not None
    [(*_, shown)] = host_tables(record)
    assert shown[1] == [
        "2", "20 ms", "sam", "40.0", "0.800", "200", "2.000", "3.00", "1.00", "6.0", "0.50"
    ]  # fmt: skip


def test_a_trace_that_says_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(to_line("g", None, [1], [[]]))
    for name in (str(trace), str(tmp_path / "missing.jsonl")):
        assert main(["bench", "host", name, "--methods", "off"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == error.count("bench host") == 1


@pytest.mark.parametrize(("num_rows", "num_lines"), [(1, 4), (32, 4), (33, 5), (256, 32)])
def test_one_rollout_copies_the_first_step_until_there_are_enough_requests(
    num_rows: int, num_lines: int
) -> None:
    """Whole lines of 6 and 10 responses, in turn; 32 requests at least."""
    text = np.arange(4, dtype=np.int32)
    recorded = [Rollout(f"group{step}", step, text, [text] * num) for step, num in ((1, 6), (1, 10), (2, 99))]
    lines = one_rollout(recorded, num_rows)
    assert [len(each.responses) for each in lines] == ([6, 10] * 16)[:num_lines]
    assert {each.step for each in lines} == {None}
