"""Reading runs, comparing them, and the report, on logs written here in verl's format."""

import dataclasses
import html
import json
import math

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.config import UserError
from rollout_spec.report.comparison import headline, sentences, table_rows, write_report
from rollout_spec.report.measures import MEASURES, compare, paired
from rollout_spec.report.responses import Agreement, first_step_agreement, is_looping
from rollout_spec.report.runs import read_run
from tests.runs import compared, write_run

LOGGED = '{"step": 3, "data": {"rollout/spec_generated_tokens": 1, "rollout/spec_rollout_seconds": '


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


def test_speedup_is_the_ratio_of_tokens_per_second_over_all_steps(comparison):
    tokens_per_second = comparison.measures["tokens_per_second"]
    assert tokens_per_second.off.value == pytest.approx(4000 / 40)
    assert tokens_per_second.on.value == pytest.approx(4000 / 21)
    assert comparison.speedup.value == pytest.approx(40 / 21)
    low, high = comparison.speedup.ci95
    assert low <= comparison.speedup.value <= high
    assert comparison.verdict == "faster"
    assert compare(comparison.on, comparison.off).verdict == "slower"


def test_the_interval_is_paired_by_step(tmp_path):
    # Steps differ fivefold in speed but the ratio is 2 in each: paired, there is nothing uncertain.
    result = compared(tmp_path, [1.0, 5.0, 2.0, 4.0], [0.5, 2.5, 1.0, 2.0])
    assert result.speedup.ci95 == pytest.approx((2.0, 2.0))


def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says():
    rng, covered, num_trials = np.random.default_rng(5), 0, 40
    for _ in range(num_trials):
        tokens, seconds = np.full(24, 100.0), rng.uniform(5, 20, size=24)
        noisy = seconds / 1.5 * np.exp(rng.normal(0, 0.2, size=24))
        *_, change = paired(np.array([tokens, seconds]), np.array([tokens, noisy]))
        # E[sum of seconds] grows by exp(sigma^2 / 2) under log-normal noise.
        covered += change.ci95[0] <= 1.5 / math.exp(0.02) <= change.ci95[1]
    assert 0.8 * num_trials <= covered < num_trials


def test_totals_weigh_each_step_by_what_it_decoded(comparison):
    measures = comparison.measures
    # 1000/2 + 1800/4 + 1200/4 decode steps for 4000 tokens.
    assert measures["tokens_per_step"].on.value == pytest.approx(4000 / (500 + 450 + 300))
    assert measures["acceptance_rate"].on.value == pytest.approx(60 / (40 + 80 + 120))
    assert measures["draft_ms"].on.value == pytest.approx(0.2)
    assert measures["tokens_per_step"].off.value == 1.0
    assert math.isnan(measures["acceptance_rate"].off.value)
    assert comparison.on.total("num_drafts") == 30
    assert (comparison.off.looping_share, comparison.on.looping_share) == (0.5, 0.25)


def test_a_step_whose_batch_an_earlier_one_counts_is_a_step(tmp_path):
    """As of an asynchronous trainer that had its second batch before the weights changed."""
    result = compared(tmp_path, [10.0, 0.0], [5.0, 2.0], [1000, 0], [600, 400])
    steps = read_run(tmp_path / "off", "off").steps
    assert [(step.step, step.generated_tokens) for step in steps] == [(1, 1000), (2, 0)]
    assert result.speedup.value == pytest.approx((1000 / 7) / (1000 / 10))
    tokens_per_step = result.measures["tokens_per_step"]
    assert (tokens_per_step.off.value, tokens_per_step.on.value) == (1, pytest.approx(1000 / (300 + 100)))
    assert "Steps without tokens of their own: 1 with off, 0 with sam." in " ".join(sentences(result))
    assert "nan" not in str([*table_rows(result), json.dumps(result.to_dict()).lower()])


def test_the_first_steps_tokens_are_compared_sample_by_sample(comparison, tmp_path):
    def record(run, step, names, responses):
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
    for run in ("off", "sam"):
        record(run, 0, [["prompt", 7, "ab", 0], ["unnamed", 0, 0, 3]], [[1], [2]])  # not of verl's workers
    agreement = first_step_agreement(tmp_path / "off", tmp_path / "sam")
    assert agreement == Agreement(num_tokens=2 + 2 + 2 + 1, num_identical=1 + 2 + 1 + 1)
    text = " ".join(sentences(dataclasses.replace(comparison, agreement=agreement)))
    assert "5 of 7 tokens were the same in both runs" in text and "not recorded" not in text
    assert "not recorded" in " ".join(sentences(comparison))
    assert first_step_agreement(tmp_path / "off", tmp_path / "nothing") is None


def test_a_comparison_says_what_was_interrupted(tmp_path):
    """Of an asynchronous trainer; what it finished under later weights is not compared."""
    comparison = compared(tmp_path, [10.0, 10.0], [5.0, 5.0], interrupted=4.0)
    assert "interrupted 0 requests with off and 8 with sam" in " ".join(sentences(comparison))
    assert ["Interrupted requests, all steps", "0", "8", ""] in table_rows(comparison)
    assert comparison.to_dict()["sam"]["num_interrupted"] == 8
    assert comparison.to_dict()["drift"] is None, "training beside rollouts measures no machine"


@pytest.mark.parametrize("training", [20.9, 22.0, 18.0])
def test_a_machine_that_drifted_makes_the_ratio_untrusted(tmp_path, training):
    comparison = compared(tmp_path, [10.0, 20.0], [5.0, 10.0], [1000, 2000], training=training)
    summary = comparison.to_dict()
    drift = training / 20.0
    assert summary["drift"] == pytest.approx(drift)
    first, second = sentences(comparison)[:2]
    took = f"took {drift:.2f}×"
    if training == 20.9:
        assert first.startswith("sam was faster: 2.00×") and not summary["has_drifted"]
        assert headline(comparison).startswith("2.00× tokens per second")
        assert second.startswith("The machine was as fast for both") and took in second
        return
    assert first.startswith("The machine changed") and took in first
    assert second.startswith("So there is no ratio")
    assert (comparison.verdict, summary["has_drifted"], summary["speedup"]) == ("unclear", True, None)
    assert headline(comparison) == "The machine changed between the two runs: no ratio"
    assert "2.00" not in first + second and "Look at step" not in first, "both steps took the same"


def test_the_step_in_which_the_machine_changed_is_named(tmp_path):
    comparison = compared(tmp_path, [10.0] * 4, [5.0] * 4, training=[60.0, 20.0, 20.0, 20.0])
    assert comparison.has_drifted
    assert "Look at step 1 of sam, which took 3.0× as long as its others." in sentences(comparison)[0]


@pytest.mark.parametrize(("waited", "is_beside"), [(0.01, True), (4.7, True), (4.9, False)])
def test_rollouts_that_the_trainer_does_not_wait_for_run_beside_it(tmp_path, waited, is_beside):
    """As in verl's separate_async, where no request need be interrupted."""
    comparison = compared(tmp_path, [10.0, 10.0], [5.0, 5.0], training=18.0, waited=waited)
    assert (math.isnan(comparison.drift), comparison.has_drifted) == (is_beside, not is_beside)
    assert comparison.verdict == ("faster" if is_beside else "unclear")


@pytest.mark.parametrize("training", [(0.0, 20.0), (20.0, 0.0), (0.0, 0.0), (math.nan, 20.0)])
def test_training_that_took_no_time_or_was_not_logged_measures_no_machine(tmp_path, training):
    off = write_run(tmp_path / "off", [10.0, 20.0], [1000, 2000], training=training[0])
    sam = write_run(tmp_path / "sam", [5.0, 10.0], [1000, 2000], True, training=training[1])
    comparison = compare(read_run(off, "off"), read_run(sam, "sam"))
    summary = comparison.to_dict()
    assert (summary["drift"], summary["has_drifted"]) == (None, False)
    text = " ".join(sentences(comparison))
    assert "inf" not in text and "drafts do not touch" not in text


def test_a_missing_value_is_left_out(tmp_path):
    whole = compared(tmp_path, [10.0] * 4, [10.0] * 4)
    first, second, third, last = whole.on.steps
    steps = first, second, dataclasses.replace(third, reward=math.nan), last
    result = compare(whole.off, dataclasses.replace(whole.on, steps=steps))
    for side in (result.measures["reward"].off, result.measures["reward"].on):  # the same steps in both
        assert side.value == pytest.approx(np.mean([0.1, 0.2, 0.4]))
    acceptance = result.measures["acceptance_rate"].off
    assert np.isnan([acceptance.value, *acceptance.ci95]).all()


def test_a_step_that_was_logged_again_counts_once_and_one_line_says_so(tmp_path, caplog):
    file = write_run(tmp_path, [10.0, 20.0], [100, 100]) / "metrics.jsonl"
    assert read_run(file, "off").column("rollout_seconds") == [10.0, 20.0] and not caplog.messages
    file.write_text(file.read_text() + file.read_text().splitlines()[-1].replace("20.0", "30.0") + "\n")
    assert read_run(file, "off").column("rollout_seconds") == [10.0, 30.0]
    [message] = caplog.messages
    assert message == f"{file}: logged more than once, the later values count: step 2"


def test_only_common_steps_are_compared(runs, tmp_path):
    short = write_run(tmp_path / "short", [10.0], [1000], True)
    off, on = read_run(runs[0], "off"), read_run(short, "sam")
    result = compare(off, on)
    assert result.off.total("generated_tokens") == 1000
    assert result.speedup.value == pytest.approx(1.0)
    assert all(math.isnan(bound) for bound in result.speedup.ci95)
    assert result.verdict == "unclear"
    text = " ".join(sentences(result))
    assert "One step gives no interval; train longer" in text
    assert "Steps that only off has are left out: 2, 3." in text
    with pytest.raises(UserError, match="no step in common"):
        compare(off, dataclasses.replace(on, steps=()))


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (("off", "sam"), None),
        (("off", "off"), "one run, given twice"),
        (("sam", "sam"), "one run, given twice"),
        (("off", "off-2"), "Neither run had drafts: on was not trained with +rollout.spec=sam."),
        (("sam", "off"), "The runs look swapped: off was trained with drafts, on without."),
        (("sam", "sam-2"), "Both runs had drafts: off was not trained with +rollout.spec=off."),
    ],
)
def test_runs_that_are_wrongly_chosen_are_told_first(tmp_path, given, warning):
    for number, name in enumerate({"off", "sam", *given}, 1):
        write_run(tmp_path / name, [5.0 * number, 6.0], [1000, 1000], name.startswith("sam"))
    off, on = given
    comparison = compare(read_run(tmp_path / off, "off"), read_run(tmp_path / on, "on"))
    first, *others = comparison.to_dict()["warnings"] or [None]
    assert not others and (first is None if warning is None else warning in first)
    page = write_report(comparison, tmp_path, {})["html"].read_text()
    assert warning is None or page.index(first) < page.index("Rollouts took")
    assert "on drafted nothing" not in " ".join(sentences(comparison))


def test_the_summary_has_the_documented_keys(runs, tmp_path, capsys):
    files = [str(run / "metrics.jsonl") for run in runs]
    assert main(["compare", *files, "--json", "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out) == summary
    assert {file.name for file in tmp_path.iterdir()} == {"summary.json", "report.html", "report.png"}
    assert set(summary) == {
        *("off", "on", "speedup", "speedup_ci95", "drift", "has_drifted"),
        *("first_step_agreement", "measures", "warnings", "made_by"),
    }
    assert summary["first_step_agreement"] is None, "these rollouts were recorded without names"
    assert set(summary["measures"]) == {measure.name for measure in MEASURES}
    assert summary["measures"]["reward"]["off"]["value"] == pytest.approx(0.2)
    assert summary["measures"]["reward"]["difference"]["value"] == pytest.approx(0.0)
    assert summary["measures"]["step_seconds"]["ratio"]["ci95"][1] < 1
    for name in ("rollout_seconds", "generated_tokens", "reward", "response_length"):
        assert len(summary["off"][name]) == len(summary["on"][name]) == 3
    assert {"tokens_per_step", "acceptance_rate", "num_drafts", "looping_share"} <= set(summary["off"])
    assert summary["on"]["num_drafts"] == 30 and summary["off"]["acceptance_rate"] is None


def test_picture_and_page_are_written_and_need_nothing_else(comparison, tmp_path):
    paths = write_report(comparison, tmp_path, {"Model": "a <small> one"})
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    page = paths["html"].read_text()
    assert {row[0]: row[1] for row in table_rows(comparison)}["Acceptance rate (%)"] == "–"
    assert all(text in html.unescape(page) for row in table_rows(comparison) for text in row)
    assert headline(comparison) in page and "a &lt;small&gt; one" in page
    assert "http://" not in page and "https://" not in page
    assert page.count("data:image/png;base64,") == 2  # one of them for phones


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "data": {"timing_s/gen": 3.0}}\n', "+rollout.spec=off"),
        ("not json\n", "metrics.jsonl:1: not a line"),
        ("[1, 2]\n", "metrics.jsonl:1: not a line"),
        ('{"step": 1e400, "data": {}}\n', "metrics.jsonl:1: not a line"),
        ("", "no step has rollout/spec_rollout_seconds"),
        (LOGGED + '1.0, "rollout/spec_num_drafts": null}}\n', "rollout/spec_num_drafts is no finite number"),
        (LOGGED + '"soon"}}\n', "step 3: rollout/spec_rollout_seconds is no number: 'soon'"),
        *(
            (LOGGED + f"{seconds}}}}}\n", "step 3: rollout/spec_rollout_seconds ")
            for seconds in ("-1.0", "Infinity", '"inf"')
        ),
        (LOGGED + '0, "rollout/spec_generated_tokens": 5}}\n', "spec_rollout_seconds must be above 0"),
        (LOGGED + '1.0, "timing_s/step": -3}}\n', "timing_s/step must be at least 0 and finite: -3"),
        (LOGGED + '1.0, "timing_s/gen": Infinity}}\n', "timing_s/gen must be at least 0 and finite: inf"),
        (LOGGED + '1.0, "critic/rewards/mean": "good"}}\n', "critic/rewards/mean is no number: 'good'"),
    ],
)
def test_a_run_that_cannot_be_read_is_one_clear_line(runs, tmp_path, refused, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert message in refused("compare", runs[0], tmp_path)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        (list(range(200)), False),
        ([1, 2, 3] * 8, True),
        ([*range(100), *([5] * 24)], True),
        ([*range(100), *([5] * 23)], False),
        ([*([1, 2, 3] * 50), 9], False),  # the loop has ended
        ([9, *([1, 2, 3] * 8), 1, 2], True),  # cut in the middle of a round
        (list(range(32)) * 4, True),
        (list(range(33)) * 4, False),  # longer than MAX_PERIOD
    ],
)
def test_is_looping(tokens, expected):
    assert is_looping(tokens) is expected
