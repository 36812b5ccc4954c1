"""Reading runs, comparing them, and the report, on logs written here in verl's format."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.report.logs import RunError
from rollout_spec.report.page import (
    headline,
    interval,
    render_html,
    sentences,
    summary_table,
    table_rows,
    write_report,
)
from rollout_spec.report.publish import figures
from rollout_spec.report.responses import Agreement, first_step_agreement
from rollout_spec.report.runs import MEASURES, compare, joined, read_run, read_steps
from rollout_spec_lab.cli.progress import ConsoleWatcher
from rollout_spec_lab.demo import runner

SPEC = "rollout/spec_"
LOGGED = '{"step": 3, "data": {"rollout/spec_generated_tokens": 1, "rollout/spec_rollout_seconds": '


def write_run(folder, seconds, tokens, drafting=False, responses=(), training=20.0, waited=None):
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, (took, generated) in enumerate(zip(seconds, tokens, strict=True), 1):
        data = {
            SPEC + "rollout_seconds": took,
            SPEC + "generated_tokens": generated,
            "critic/rewards/mean": 0.1 * step,
            "response_length/mean": generated / 16,
            "actor/entropy": 1.0 - 0.1 * step,
            "timing_s/gen": took + 1.0 if waited is None else waited,
            "timing_s/old_log_prob": 0.25 * training,
            "timing_s/update_actor": 0.75 * training,
            "timing_s/step": took + training,
            "perf/total_num_tokens": 2000,
        }
        if drafting:
            data |= {
                SPEC + "tokens_per_step": 2.0 if step == 1 else 4.0,
                SPEC + "num_drafts": 10,
                SPEC + "num_draft_tokens": 40 * step,
                SPEC + "num_accepted_tokens": 20,
                SPEC + "model_share": 0.25,
                SPEC + "model_acceptance_rate": 0.6 / step,
                SPEC + "text_acceptance_rate": 0.4,
                SPEC + "draft_ms": 0.1 * step,
                SPEC + "model_ms": 1.5,
                SPEC + "num_model_passes": 100 * step,
                SPEC + "num_model_passes_left_out": 100,
            }
        lines.append(json.dumps({"step": step, "data": data}))
    # Validation logs under the same step, without rollout times.
    lines.insert(0, json.dumps({"step": 0, "data": {"val-core/demo/reward/mean@1": 0.5}}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if responses:
        trace = {"group": "a", "step": 1, "prompt_token_ids": [1], "responses": responses}
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "engine0.jsonl").write_text(json.dumps(trace) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("runs")
    loop, plain = [7, 8] * 20, list(range(40))
    off = write_run(tmp_path / "off", [10.0, 20.0, 10.0], [1000, 2000, 1000], responses=[loop, plain])
    sam = write_run(tmp_path / "sam", [5.0, 10.0, 6.0], [1000, 1800, 1200], True, [plain, plain, plain, loop])
    return off, sam


@pytest.fixture(scope="module")
def comparison(runs):
    return compare(read_run(runs[0], "off"), read_run(runs[1], "sam"))


@pytest.fixture(scope="module")
def report(comparison, tmp_path_factory):
    return write_report(comparison, tmp_path_factory.mktemp("report"), {"Model": "a <small> one"})


def test_speedup_is_the_ratio_of_tokens_per_second_over_all_steps(comparison):
    tokens_per_second = comparison.measures["tokens_per_second"]
    assert tokens_per_second.off.value == pytest.approx(4000 / 40)
    assert tokens_per_second.on.value == pytest.approx(4000 / 21)
    assert comparison.speedup == pytest.approx(40 / 21)
    low, high = comparison.speedup_ci95
    assert low <= comparison.speedup <= high
    assert comparison.verdict == "faster"


def test_the_interval_is_paired_by_step(tmp_path):
    # Steps differ fivefold in speed but the ratio is 2 in each: paired, there is nothing uncertain.
    off = write_run(tmp_path / "off", [1.0, 5.0, 2.0, 4.0], [100] * 4)
    sam = write_run(tmp_path / "sam", [0.5, 2.5, 1.0, 2.0], [100] * 4, True)
    result = compare(read_run(off, "off"), read_run(sam, "sam"))
    assert result.speedup_ci95 == pytest.approx((2.0, 2.0))


def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says(tmp_path):
    rng, covered, num_trials = np.random.default_rng(5), 0, 40
    for trial in range(num_trials):
        seconds = rng.uniform(5, 20, size=24)
        noisy = seconds / 1.5 * np.exp(rng.normal(0, 0.2, size=24))
        off = write_run(tmp_path / f"off{trial}", seconds.tolist(), [100] * 24)
        sam = write_run(tmp_path / f"sam{trial}", noisy.tolist(), [100] * 24, True)
        low, high = compare(read_run(off, "off"), read_run(sam, "sam")).speedup_ci95
        # E[sum of seconds] grows by exp(sigma^2 / 2) under log-normal noise.
        covered += low <= 1.5 / math.exp(0.02) <= high
    assert 0.8 * num_trials <= covered < num_trials


def test_totals_weigh_each_step_by_what_it_decoded(comparison):
    # 1000/2 + 1800/4 + 1200/4 decode steps for 4000 tokens.
    tokens_per_step, acceptance_rate = (
        comparison.measures[n] for n in ("tokens_per_step", "acceptance_rate")
    )
    assert tokens_per_step.on.value == pytest.approx(4000 / (500 + 450 + 300))
    assert acceptance_rate.on.value == pytest.approx(60 / (40 + 80 + 120))
    assert comparison.on.total("num_drafts") == 30
    of_model, of_text = (comparison.measures[f"{source}_acceptance_rate"] for source in ("model", "text"))
    assert of_model.on.value == pytest.approx((6 + 6 + 6) / (10 + 20 + 30))
    assert of_text.on.value == pytest.approx(0.4) and math.isnan(of_model.off.value)
    of_sources = ("model_share", "draft_ms", "model_ms", "num_model_passes", "share_passes_left_out")
    expected = (0.25, 0.2, 1.5, 200, 300 / (600 + 300))
    assert [comparison.measures[name].on.value for name in of_sources] == pytest.approx(expected)
    rows = {row[0]: row[2] for row in table_rows(comparison, intervals=False)}
    assert rows["Draft tokens, model's share (%)"] == "25.0"
    assert rows["Drafter, per engine step (ms)"] == "0.20"
    assert tokens_per_step.off.value == 1.0
    assert math.isnan(acceptance_rate.off.value)
    assert (comparison.off.looping_share, comparison.on.looping_share) == (0.5, 0.25)


def test_a_step_whose_batch_an_earlier_one_counts_is_a_step(tmp_path, capsys):
    """As of an asynchronous trainer that had its second batch before the weights changed."""
    off = write_run(tmp_path / "off", [10.0, 0.0], [1000, 0])
    sam = write_run(tmp_path / "sam", [5.0, 2.0], [600, 400], True)
    steps = list(read_steps(off / "metrics.jsonl"))
    assert [(step.step, step.generated_tokens) for step in steps] == [(1, 1000), (2, 0)]
    with ConsoleWatcher(2) as watcher:
        for step in steps:
            watcher.step(step)
    assert "step 2/2: no tokens of its own, " in capsys.readouterr().err

    result = compare(read_run(off, "off"), read_run(sam, "sam"))
    assert result.speedup == pytest.approx((1000 / 7) / (1000 / 10))
    tokens_per_step = result.measures["tokens_per_step"]
    assert (tokens_per_step.off.value, tokens_per_step.on.value) == (1, pytest.approx(1000 / (300 + 100)))
    assert "Steps without tokens of their own: 1 with off, 0 with sam." in " ".join(sentences(result))
    assert "nan" not in str([*table_rows(result), json.dumps(result.to_dict()).lower()])


def test_the_first_steps_tokens_are_compared_sample_by_sample(comparison, tmp_path):
    def record(run: str, step: int, names: list, responses: list[list[int]]) -> None:
        file = tmp_path / run / "rollouts" / "rollouts-0.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        line = {"group": "g", "step": step, "prompt_token_ids": [1], "responses": responses, "names": names}
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")

    name = lambda step, number, kind="train": [7, step, kind, "0", "text", 0, number]  # noqa: E731
    record("off", 0, [name(1, 0), name(1, 1), name(1, 2)], [[5, 6, 7], [5, 5], [9]])
    record("off", 1, [name(2, 0)], [[1, 1, 1, 1]])
    # Other order of completion, one token different, one response longer; another sample and a validation.
    record("sam", 0, [name(1, 1), name(1, 0), name(1, 2)], [[5, 5], [5, 8, 7], [9, 4]])
    record("sam", 0, [name(0, 0, "val"), name(1, 3), None], [[1], [2], [3]])
    agreement = first_step_agreement(tmp_path / "off", tmp_path / "sam")
    assert agreement == Agreement(num_tokens=2 + 2 + 2, num_identical=1 + 2 + 1)
    text = " ".join(sentences(dataclasses.replace(comparison, agreement=agreement)))
    assert "Before the first weight sync 4 of 6 tokens were the same in both runs" in text
    assert "not recorded" not in text
    assert "Which tokens agree was not recorded" in " ".join(sentences(comparison))
    assert first_step_agreement(tmp_path / "off", tmp_path / "nothing") is None


def test_a_comparison_says_what_was_interrupted(tmp_path):
    """Of an asynchronous trainer; what it finished under later weights is not compared."""
    for name, interrupted in (("off", 3.0), ("sam", 4.0)):
        (tmp_path / name).mkdir()
        values = {"rollout/spec_rollout_seconds": 2.0, "rollout/spec_generated_tokens": 100}
        lines = [
            {"step": step, "data": values | {"rollout/spec_num_interrupted": interrupted}} for step in (1, 2)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    runs = [read_run(tmp_path / name, name) for name in ("off", "sam")]
    comparison = compare(*runs)
    text = " ".join(sentences(comparison))
    assert "weight syncs interrupted 6 requests with off and 8 with sam" in text
    assert ["Interrupted requests, all steps", "6", "8", ""] in table_rows(comparison)
    assert comparison.to_dict()["sam"]["num_interrupted"] == 8


@pytest.mark.parametrize("training", [20.9, 22.0, 18.0])
def test_a_machine_that_drifted_makes_the_ratio_untrusted(tmp_path, training):
    off = write_run(tmp_path / "off", [10.0, 20.0], [1000, 2000])
    sam = write_run(tmp_path / "sam", [5.0, 10.0], [1000, 2000], True, training=training)
    comparison = compare(read_run(off, "off"), read_run(sam, "sam"))
    summary = comparison.to_dict()
    assert summary["drift"] == pytest.approx(training / 20.0)
    assert summary["corrected_speedup"] == pytest.approx(2.0 * training / 20.0)
    published = [2.0, training / 20.0, 2.0 * training / 20.0]
    assert list(figures(comparison).values()) == pytest.approx(published)
    first, second = sentences(comparison)[:2]
    took = f"took {training / 20.0:.2f}×"
    if training == 20.9:
        assert first.startswith("sam was faster: 2.00×") and not summary["has_drifted"]
        assert headline(comparison) == "2.00×"
        assert second.startswith("The machine was as fast for both") and took in second
        return
    corrected = f"{training / 10.0:.2f}×"
    assert first.startswith("Do not trust this ratio") and took in first and f"{corrected}." in first
    assert second.startswith("As measured, sam had 2.00× the generated tokens")
    assert (comparison.verdict, summary["has_drifted"]) == ("unclear", True)
    page = render_html(comparison, {}, {})
    assert f"<h1>2.00× (corrected {corrected})</h1>" in page and '<header class="unclear">' in page
    assert f"<title>rollout_spec: 2.00× (corrected {corrected}) rollout speed" in page
    assert summary_table(comparison).title.startswith(f"2.00× (corrected {corrected}) tokens per second")


def test_a_machine_that_drifted_corrects_no_ratio_that_is_not_there(tmp_path):
    off = write_run(tmp_path / "off", [5.0, 10.0], [1000, 2000])
    sam = write_run(tmp_path / "sam", [0.0, 0.0], [1000, 2000], True, training=22.0)
    comparison = compare(read_run(off, "off"), read_run(sam, "sam"))
    assert comparison.has_drifted and headline(comparison) == "–×"
    assert "Corrected" not in sentences(comparison)[0] and interval(comparison) == "no interval"


def test_training_beside_rollouts_and_training_not_logged_measure_no_machine(comparison):
    on = dataclasses.replace(
        comparison.on,
        steps=tuple(dataclasses.replace(step, num_interrupted=1) for step in comparison.on.steps),
    )
    beside = dataclasses.replace(comparison, on=on)
    without = [dataclasses.replace(step, update_ms=math.nan) for step in comparison.off.steps]
    unknown = compare(dataclasses.replace(comparison.off, steps=tuple(without)), comparison.on)
    for each in (beside, unknown):
        assert each.to_dict()["drift"] is None and not each.has_drifted
        assert not any("drafts do not touch" in sentence for sentence in sentences(each))


@pytest.mark.parametrize(("waited", "is_beside"), [(0.01, True), (4.7, True), (4.9, False)])
def test_rollouts_that_the_trainer_does_not_wait_for_run_beside_it(tmp_path, waited, is_beside):
    """As in verl's separate_async, where no request need be interrupted."""
    off = write_run(tmp_path / "off", [10.0, 10.0], [1000, 1000])
    sam = write_run(tmp_path / "sam", [5.0, 5.0], [1000, 1000], True, training=18.0, waited=waited)
    comparison = compare(read_run(off, "off"), read_run(sam, "sam"))
    assert (math.isnan(comparison.drift), comparison.has_drifted) == (is_beside, not is_beside)
    assert comparison.verdict == ("faster" if is_beside else "unclear")


@pytest.mark.parametrize("training", [(0.0, 20.0), (20.0, 0.0), (0.0, 0.0)])
def test_training_that_takes_no_time_measures_no_machine(tmp_path, training):
    off = write_run(tmp_path / "off", [10.0, 20.0], [1000, 2000], training=training[0])
    sam = write_run(tmp_path / "sam", [5.0, 10.0], [1000, 2000], True, training=training[1])
    comparison = compare(read_run(off, "off"), read_run(sam, "sam"))
    summary = comparison.to_dict()
    assert (summary["drift"], summary["corrected_speedup"], summary["has_drifted"]) == (None, None, False)
    assert "inf" not in " ".join(sentences(comparison))
    assert figures(comparison) == {"rollout_spec/speedup": pytest.approx(2.0)}


def test_runs_of_several_pairs_are_compared_step_by_step(tmp_path):
    """The first of them has lost its last step."""
    loop, plain = [7, 8] * 20, list(range(40))
    seconds = {"off": [[10.0], [12.0, 18.0]], "sam": [[5.0, 10.0], [4.0, 9.0]]}
    runs = {}
    for method, of_pairs in seconds.items():
        folders = [
            write_run(tmp_path / f"{method}-{i}", each, [100, 200][: len(each)], responses=[loop, text])
            for i, (each, text) in enumerate(zip(of_pairs, (plain, loop), strict=True))
        ]
        runs[method] = joined(method, [read_run(folder, method) for folder in folders], num_steps=2)
    comparison = compare(runs["off"], runs["sam"])
    assert comparison.off.column("step") == comparison.on.column("step") == [1, 3, 4]
    assert comparison.left_out == {"off": [], "sam": [2]}
    assert comparison.speedup == pytest.approx(40 / 18)
    assert comparison.off.looping_share == 0.75


def test_pairs_are_trained_in_turn(tmp_path, monkeypatch):
    trained = []

    def train(plan, name, *_):
        trained.append(name)
        write_run(plan.output / name, [10.0, 20.0] if "off" in name else [5.0, 10.0], [100, 200])

    monkeypatch.setattr(runner, "train", train)
    plan = runner.Plan(output=tmp_path, pairs=2, model=tmp_path, train_file=tmp_path / "train.parquet")
    comparison = runner.run_demo(plan, runner.Watcher())
    assert trained == ["off", "sam", "off-2", "sam-2"]
    assert comparison.on.column("step") == [1, 2, 3, 4] and comparison.speedup == pytest.approx(2.0)


def test_means_have_intervals_and_a_missing_value_is_left_out(tmp_path):
    rng = np.random.default_rng(3)
    seconds = rng.uniform(5, 20, size=30).tolist()
    off = read_run(write_run(tmp_path / "off", seconds, [100] * 30), "off")
    on = read_run(write_run(tmp_path / "sam", seconds, [100] * 30, True), "sam")
    steps = list(on.steps)
    steps[4] = dataclasses.replace(steps[4], reward=math.nan)
    result = compare(off, dataclasses.replace(on, steps=tuple(steps)))
    time, reward = result.measures["rollout_seconds"], result.measures["reward"]
    # The interval of a mean of 30: two standard errors to each side, about.
    error = np.std(seconds) / math.sqrt(30)
    assert time.off.value == pytest.approx(np.mean(seconds))
    assert time.off.ci95 == pytest.approx(
        (np.mean(seconds) - 1.96 * error, np.mean(seconds) + 1.96 * error), abs=0.15 * error
    )
    assert time.change.value == 1.0 and time.change.ci95 == (1.0, 1.0)
    known = [0.1 * step for step in range(1, 31) if step != 5]
    assert reward.on.value == pytest.approx(np.mean(known))
    low, high = result.measures["acceptance_rate"].off.ci95
    assert math.isnan(result.measures["acceptance_rate"].off.value) and math.isnan(low) and math.isnan(high)


def test_only_common_steps_are_compared(runs, tmp_path):
    short = write_run(tmp_path / "short", [10.0], [1000], True)
    result = compare(read_run(runs[0], "off"), read_run(short, "sam"))
    assert result.off.total("generated_tokens") == 1000
    assert result.speedup == pytest.approx(1.0)
    assert all(math.isnan(bound) for bound in result.speedup_ci95)
    assert result.verdict == "unclear"
    assert "One step gives no interval; train longer" in " ".join(sentences(result))


def test_the_summary_has_the_documented_keys(report):
    summary = json.loads(report["json"].read_text())
    assert report["json"].name == "summary.json"
    assert set(summary) == {
        *("off", "sam", "speedup", "speedup_ci95", "drift", "has_drifted", "corrected_speedup"),
        *("first_step_agreement", "measures"),
    }
    assert summary["first_step_agreement"] is None, "these rollouts were recorded without names"
    assert set(summary["measures"]) == {measure.name for measure in MEASURES}
    reward = summary["measures"]["reward"]
    assert reward["off"]["value"] == pytest.approx(0.2)
    assert reward["difference"]["value"] == pytest.approx(0.0)
    assert summary["measures"]["step_seconds"]["ratio"]["ci95"][1] < 1
    for name in ("rollout_seconds", "generated_tokens", "reward", "response_length"):
        assert len(summary["off"][name]) == len(summary["sam"][name]) == 3
    assert summary["sam"]["num_drafts"] == 30
    assert summary["off"]["acceptance_rate"] is None
    assert {"tokens_per_step", "acceptance_rate", "num_drafts", "looping_share"} <= set(summary["off"])


def test_picture_and_page_are_written_and_need_nothing_else(comparison, report):
    assert report["png"].read_bytes().startswith(b"\x89PNG")
    page = report["html"].read_text()
    assert headline(comparison) in page
    assert "a &lt;small&gt; one" in page
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("data:image/png;base64,") == len(MEASURES)
    charts = sorted(report["charts"].iterdir())
    assert [chart.stem for chart in charts] == sorted(measure.name for measure in MEASURES)
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in charts)


def test_a_loss_is_called_a_loss(runs):
    slower = compare(read_run(runs[1], "sam"), read_run(runs[0], "off"))
    assert slower.verdict == "slower"
    text = " ".join(sentences(slower))
    assert "was slower here" in text
    assert "drafted nothing" in text and "rollout/spec_share_off_cost" in text
    assert "rollout/spec_share_off_threshold: take rollout.spec.batch_threshold=auto" in text


def test_few_steps_and_looping_are_named(comparison):
    text = " ".join(sentences(comparison))
    assert "50.0% with off, 25.0% with sam" in text
    assert "3 steps is rough" in text
    table = summary_table(comparison)
    assert table.row_count == len(MEASURES) + 3 and table.title.startswith("1.90×")


def test_compare_takes_the_logger_file_itself_and_prints_json(runs, tmp_path, capsys):
    files = [str(run / "metrics.jsonl") for run in runs]
    assert main(["compare", *files, "--json", "--output", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"] == pytest.approx(40 / 21)
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"charts", "summary.json", "report.html", "report.png"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "data": {"timing_s/gen": 3.0}}\n', "+rollout.spec=off"),
        ("not json\n", "metrics.jsonl:1: not a line"),
        ("[1, 2]\n", "metrics.jsonl:1: not a line"),
        ('{"step": 1e400, "data": {}}\n', "metrics.jsonl:1: not a line"),
        ("", "no step has rollout/spec_rollout_seconds"),
        (
            LOGGED + '1.0, "rollout/spec_num_drafts": null}}\n',
            "metrics.jsonl: step 3: rollout/spec_num_drafts is no finite number",
        ),
        (
            LOGGED + '"soon"}}\n',
            "metrics.jsonl: step 3: rollout/spec_rollout_seconds is no number: 'soon'",
        ),
        (
            LOGGED + '1.0, "critic/rewards/mean": "good"}}\n',
            "metrics.jsonl: step 3: critic/rewards/mean is no number: 'good'",
        ),
    ],
)
def test_a_run_that_cannot_be_read_is_one_clear_line(runs, tmp_path, capsys, text, message):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "metrics.jsonl").write_text(text)
    assert main(["compare", str(runs[0]), str(bad)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_runs_cut_at_any_byte_of_their_last_lines_compare_as_far_as_they_are_whole(
    runs, tmp_path, caplog, capsys
):
    run = write_run(tmp_path / "sam", [5.0, 10.0, 6.0], [1000, 1800, 1200], True, [[1, 2], [3, 4]])
    metrics, trace = run / "metrics.jsonl", run / "rollouts" / "engine0.jsonl"
    for file, lost in ((metrics, "Steps that only off has are left out: 3."), (trace, None)):
        data = file.read_bytes()
        last = data.rfind(b"\n", 0, -1) + 1
        for length in range(last, len(data)):
            file.write_bytes(data[:length])
            comparison = compare(
                read_run(runs[0], "off"), read_run(run, "sam"), agreement=first_step_agreement(runs[0], run)
            )
            if lost:
                assert lost in sentences(comparison)
        file.write_bytes(data)
    metrics.write_bytes(metrics.read_bytes()[:-9])
    trace.write_bytes(trace.read_bytes()[:-9])
    caplog.clear()
    assert main(["compare", str(runs[0]), str(run), "--output", str(tmp_path / "out")]) == 0
    assert "Steps that only off has are left out: 3." in " ".join(capsys.readouterr().out.split())
    assert caplog.messages == [
        f"{file}: the last line is cut off, it is left out"
        for file in (f"{metrics}:4", f"{trace}:1", f"{trace}:1")
    ]


def test_runs_without_a_common_step_do_not_compare(runs):
    off = read_run(runs[0], "off")
    nothing = read_run(runs[1], "sam")
    with pytest.raises(RunError, match="no step in common"):
        compare(off, type(off)("sam", tuple(s for s in nothing.steps if s.step > 9)))
