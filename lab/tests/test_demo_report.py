"""What the demo makes of the runs that it has trained."""

from __future__ import annotations

import pytest

from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run, read_steps
from rollout_spec_lab.cli.progress import ConsoleWatcher
from rollout_spec_lab.demo import runner
from tests.test_report import write_run


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
        runs[method] = runner.joined(method, [read_run(folder, method) for folder in folders], num_steps=2)
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


def test_a_step_without_tokens_of_its_own_is_shown(tmp_path, capsys):
    run = write_run(tmp_path / "off", [10.0, 0.0], [1000, 0])
    with ConsoleWatcher(2) as watcher:
        for step in read_steps(run / "metrics.jsonl"):
            watcher.step(step)
    assert "step 2/2: no tokens of its own, " in capsys.readouterr().err
