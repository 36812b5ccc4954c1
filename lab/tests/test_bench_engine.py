"""Whole rollouts: a long-tailed load, the same for all; a timeline is read right; methods are paired."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import EngineArgs
from vllm.platforms import current_platform

from rollout_spec.cli.models import device_arguments, model_drafter
from rollout_spec.config import ConfigError, SpecConfig, UserError
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import Rollout
from rollout_spec_lab.bench.cpu_rejection import mend_cpu_rejection
from rollout_spec_lab.bench.engine import EnginePlan, Method, make_record, predict
from rollout_spec_lab.bench.engine_worker import _method_arguments
from rollout_spec_lab.bench.jobs import EngineJob, answers, last
from rollout_spec_lab.bench.load import Load, first_responses, recorded_load
from rollout_spec_lab.bench.rollouts import tables
from rollout_spec_lab.bench.timeline import Timeline, step_times, summarise
from rollout_spec_lab.cli.bench_engine import METHODS
from rollout_spec_lab.cli.inputs import default_dtype
from rollout_spec_lab.cli.methods import checked_methods


def timeline(steps: list[tuple[float, int, int, int, int, int]]) -> Timeline:
    """A timeline of steps: (seconds, running, rows, tokens, draft tokens, accepted)."""
    line = Timeline()
    for seconds, running, rows, tokens, drafted, accepted in steps:
        line.add(
            seconds=seconds, num_running=running, num_rows=rows, num_tokens=tokens,
            num_prefills=tokens - rows - accepted, num_draft_tokens=drafted, num_accepted_tokens=accepted,
        )  # fmt: skip
    return line


def line(group: str, prompt: list[int], *responses: list[int]) -> Rollout:
    texts = [np.array(each, np.int32) for each in (prompt, *responses)]
    return Rollout(group, None, texts[0], texts[1:])


# Two prefills beside a decode, two steps of three, one of two with drafts, then few with and without.
JOB = EngineJob(model="", dtype="", method="off", engine={}, spec={"history": 2})
LINE = timeline(
    [
        (0.5, 3, 1, 3, 0, 0),
        (0.25, 3, 3, 3, 0, 0),
        (0.25, 1, 1, 1, 0, 0),
        (0.5, 3, 3, 3, 0, 0),
        (1.0, 2, 2, 5, 8, 3),
        (0.25, 1, 1, 2, 4, 1),
        (0.75, 2, 2, 2, 3, 0),
        (0.25, 1, 1, 1, 0, 0),
    ]
)


def test_the_tail_begins_behind_the_last_step_with_more_requests():
    """One arrival late in the rollout is still the front phase."""
    found = LINE.figures(threshold=2)
    assert (found["front_s"], found["tail_s"], found["makespan_s"]) == (1.5, 2.25, 3.75)
    assert (found["front_tokens"], found["tail_tokens"], found["num_tokens"]) == (10, 10, 20)
    assert (found["num_row_steps"], found["num_decoded_tokens"]) == (14, 18)
    assert (found["num_draft_tokens"], found["num_accepted_tokens"]) == (15, 4)
    assert found["num_steps"] == 8
    assert LINE.figures(threshold=3)["front_s"] == 0
    assert LINE.figures(threshold=0)["tail_s"] == 0


def run(front: tuple[float, int], tail: tuple[float, int], drafted: int = 0, accepted: int = 0) -> dict:
    return {
        "front_s": front[0], "front_tokens": front[1], "tail_s": tail[0], "tail_tokens": tail[1],
        "makespan_s": front[0] + tail[0], "num_tokens": front[1] + tail[1], "num_row_steps": 10,
        "num_decoded_tokens": 10 + accepted, "num_draft_tokens": drafted, "num_accepted_tokens": accepted,
        "num_steps": 5, "draft_cpu_s": 0.25,
    }  # fmt: skip


def test_methods_are_compared_repeat_by_repeat():
    """A machine twice as slow in the second repeat: the ratios are the same, so the interval has no width."""
    off = [run((2, 100), (2, 20)), run((4, 100), (4, 20))]
    sam = [run((2, 80), (1, 40), 8, 4), run((4, 80), (2, 40), 8, 4)]
    first, second = summarise({"off": off, "sam": sam})
    assert first["ratios"]["tokens_per_s"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    assert first["acceptance_rate"] is None
    assert second["makespan_s"] == 4.5
    assert second["tail_tokens_per_s"] == pytest.approx(80 / 3)
    assert second["ratios"]["tail_tokens_per_s"]["ci95"] == pytest.approx([4.0, 4.0])
    assert second["ratios"]["front_tokens_per_s"]["value"] == pytest.approx(0.8)
    assert (second["acceptance_rate"], second["tokens_per_step"]) == (0.5, 1.4)


def test_step_times_leave_prefills_out_and_tell_drafted_steps():
    rows = step_times([LINE])
    assert rows == [
        {"drafted": False, "num_tokens": 1, "seconds": 0.25, "num_steps": 2},
        {"drafted": False, "num_tokens": 3, "seconds": 0.375, "num_steps": 2},
        {"drafted": True, "num_tokens": 5, "seconds": 0.5, "num_steps": 2},
        {"drafted": True, "num_tokens": 10, "seconds": 1.0, "num_steps": 1},
    ]


def test_lengths_are_long_tailed_and_the_same_for_every_method():
    load = Load([[1], [2]], group_size=500, median_tokens=80, sigma=0.9, max_tokens=512)
    lengths = np.array([request["max_tokens"] for request in load.requests(0)])
    assert lengths.tolist() == [request["max_tokens"] for request in load.requests(0)]
    assert lengths.tolist() != [request["max_tokens"] for request in load.requests(1)]
    assert np.median(lengths) == pytest.approx(80, rel=0.1)
    assert lengths.mean() > 1.3 * np.median(lengths)
    assert lengths.min() >= 8 and lengths.max() == 512
    names = {json.dumps(request["name"]) for repeat in (0, 1) for request in load.requests(repeat)}
    assert len(names) == 2000
    natural = Load([[1]], natural_ends=True, max_tokens=64).requests(0)
    assert {request["max_tokens"] for request in natural} == {64}


def test_methods_pass_their_threshold_on():
    assert Method("sam:16").options({"history": 2}) == {"history": 2, "batch_threshold": 16}
    assert Method("sam").options({}) == {}
    on_mrv1 = Method("sam:16/mrv1")
    assert (on_mrv1.name, on_mrv1.options({})) == ("sam", {"batch_threshold": 16})
    assert [Method(each).environment for each in ("off", "off/mrv1", "suffix/mrv2")] == [
        {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    ]  # fmt: skip
    for label, message in (
        ("magic", "method 'magic': must be off"),
        ("off:8", "method 'off:8': must be off"),
        ("ngram:8", "method 'ngram:8'"),
        ("sam:many", "rollout.spec.batch_threshold='many'"),
        ("sam/v3", "method 'sam/v3'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Method(label)


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_plain_vllm_decides_where_there_is_an_accelerator(
    has_accelerator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """CUDA graphs and asynchronous scheduling are its defaults; a CPU gets a small engine without graphs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    default = EngineArgs(model=str(tmp_path))
    assert not default.enforce_eager and default.async_scheduling is not False
    made = EngineArgs(model=str(tmp_path), **device_arguments(), **_method_arguments(JOB))
    assert (made == default) == has_accelerator
    assert made.enforce_eager != has_accelerator
    assert default_dtype() == ("bfloat16" if has_accelerator else "float32")


def test_a_model_drafts_alone_or_beside_the_text(tmp_path: Path):
    head = tmp_path / "to:head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    given = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    assert model_drafter(f"eagle3:{head}:3", 3) == given
    assert model_drafter("mtp::1", 3) == {"method": "mtp", "num_speculative_tokens": 1}
    for wrong in ("eagle3::3", "eagle3:33", f"eagle3:{head}:4", "mtp::0", "ngram::3"):
        with pytest.raises(UserError, match=r"must be METHOD:MODEL:NUMBER\. .* NUMBER: .* 1 to 3\.$"):
            model_drafter(wrong, 3)
    with pytest.raises(UserError, match=r"no Hugging Face folder \(config.json is missing\)"):
        model_drafter(f"eagle3:{tmp_path}:3", 3)
    job = replace(JOB, model_drafter=given)
    alone, both = (_method_arguments(replace(job, method=method)) for method in ("model", "sam+model:4"))
    assert alone["speculative_config"] == given
    assert alone["additional_config"]["rollout_spec"] == {"method": "keyed"}
    assert both["speculative_config"] == given | {"num_speculative_tokens": SpecConfig.num_speculative_tokens}
    options = {"untested_vllm": True, "history": 2, "batch_threshold": 4, "model_tokens": 3}
    assert both["additional_config"]["rollout_spec"] == options


@pytest.mark.parametrize("has_arctic", [True, False])
def test_suffix_is_compared_where_it_is_installed(has_arctic, monkeypatch, capsys):
    for name in ("arctic_inference", "arctic_inference.suffix_decoding"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if has_arctic else None)
    methods = checked_methods("bench engine", METHODS, None, {})
    assert methods == ["off", "ngram", *["suffix"] * has_arctic, "sam"]
    assert ("rollout-spec-lab bench engine: without suffix: " in capsys.readouterr().err) != has_arctic


def test_the_folder_that_a_worker_starts_in_hides_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As an unbuilt checkout would."""
    echo = "import shutil, sys; shutil.copy(*sys.argv[1:])"
    for name, code in (("here", "raise SystemExit('the wrong one')"), ("there", echo)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "echo.py").write_text(code)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    assert last(answers("echo", {"a": 1}, "", tmp_path)) == {"a": 1}


LINES = [line("a", [1, 2, 3], [4, 5, 6, 7], [4, 5]), line("b", [8, 9], [5, 5, 5])]


def test_a_recording_is_served_as_it_was(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10}))
    load = recorded_load(LINES, 3, str(tmp_path))
    assert [(each["prompt"], each["max_tokens"]) for each in load.requests(0)] == [(0, 3), (0, 2), (1, 3)]
    assert load.all_recorded == [[4, 5, 6], [4, 5], [5, 5, 5]]
    again = load.lines(0, load.all_recorded)
    assert [[each.tolist() for each in one.responses] for one in again] == load.recorded
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    with pytest.raises(UserError, match="has the token 9, the model's vocabulary is of 9"):
        recorded_load(LINES, 3, str(tmp_path))
    with pytest.raises(UserError, match="--rows 4: the recording has 3 responses"):
        first_responses(LINES, 4)


def test_predictions_are_beside_what_was_measured(tmp_path: Path):
    """Plain steps took 1 s in the first repeat and 2 s in the second; the roofline says 4 s."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10}))
    load = recorded_load(LINES[:1], 4, str(tmp_path))
    plan = EnginePlan(load, ["off", "suffix"], "", "float32", {"max_num_seqs": 2}, {}, repeats=2)

    def served(seconds: float) -> dict:
        steps = [(seconds, 2, 0, 2, 0, 0), (seconds, 2, 2, 2, 0, 0)] + [(seconds, 1, 1, 1, 0, 0)] * 2
        return {
            "timeline": asdict(timeline(steps)), "responses": load.all_recorded, "draft_cpu_s": 0.0,
            "counters": {}, "settings": {"options": None, "model_runner": "MRV1"},
        }  # fmt: skip

    of_all = {method: [served(1.0), served(2.0)] for method in plan.methods}
    record = make_record(plan, of_all)
    predict(record, plan, of_all, {"MRV1": StepTimes.parse("1:4")})
    off, suffix = record["results"]
    steps = 6 / (2 * 2.0 + 2 * 2.0 + 2 * 1.0 + 2 * 1.0)
    assert off["tokens_per_s"] == 1.0
    assert off["predicted_tokens_per_s"] == pytest.approx({"step_times": 2 * steps, "roofline": 6 / 16})
    assert "predicted_tokens_per_s" not in suffix
    shown = [*tables(record)][-1][-1]
    assert shown == [["off", "1", "1", "0"]]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="only vLLM's CPU engine has this defect")
def test_only_a_rejection_kernel_that_is_wrong_is_mended(monkeypatch):
    from vllm.utils import cpu_triton_utils

    def right(*_, NO_DRAFT_PROBS, USE_FP64_GUMBEL):  # noqa: N803
        pass

    def of_fewer_arguments(*_, NO_DRAFT_PROBS):  # noqa: N803
        pass

    for kernel in (right, of_fewer_arguments):
        launched = SimpleNamespace(func=kernel)
        monkeypatch.setattr(cpu_triton_utils, "_sample_recovered_tokens_kernel_impl", kernel)
        monkeypatch.setattr(cpu_triton_utils, "sample_recovered_tokens_kernel", launched)
        mend_cpu_rejection()
        assert (launched.func is kernel) == (kernel is right)
        launched.func(*[torch.zeros(1)] * 8, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False)
