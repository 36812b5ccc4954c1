"""The same run through each of verl's own loggers, read back; and what cannot be read."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import wandb

from rollout_spec.cli import main
from rollout_spec.config import UserError
from rollout_spec.report.comparison import sentences
from rollout_spec.report.logs import read_log, wandb_records
from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run

SPEC = "rollout/spec_"
NUM_STEPS = 3
PROJECT, NAME = "logs", "on"


# verl's tracker writes what the tests read, with three loggers at once, in a process of its own.
WRITE = """
import json, sys
from verl.utils.tracking import Tracking

project, name, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tracker = Tracking(project, name, ["wandb", "tensorboard", "file"], config={"trainer": {}})
for step, data in rows:
    tracker.log(data=data, step=step)
tracker.finish()
"""


def rows(speed):
    """Of each step a validation's line, then the training's, with a NaN and enough keys for two blocks."""
    written: list[tuple[int, dict[str, float]]] = []
    for step in range(1, NUM_STEPS + 1):
        written.append((step, {"val-core/demo/reward/mean@1": 0.5}))
        training = {
            SPEC + "rollout_seconds": 10.0 * step / speed, SPEC + "generated_tokens": 1000.0 + step,
            SPEC + "tokens_per_step": 1.5, SPEC + "num_draft_tokens": 40.0,
            SPEC + "num_accepted_tokens": 20.0, "timing_s/gen": 40.0, "timing_s/update_actor": 12.0,
            "perf/total_num_tokens": 2000.0, "timing_s/step": 30.0, "critic/rewards/mean": 0.25 * step,
            "response_length/mean": 64.0, "actor/entropy": math.nan if step == 2 else 0.5,
        }  # fmt: skip
        written.append((step, training | {f"filler/{i}": float(i) for i in range(800)}))
    return written


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    paths = {kind: folder / kind for kind in ("json", "wandb", "tensorboard")}
    for path in paths.values():
        path.mkdir()
    env = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(paths["wandb"]), "WANDB_SILENT": "true",
        "TENSORBOARD_DIR": str(paths["tensorboard"]),
        "VERL_FILE_LOGGER_PATH": str(paths["json"] / "metrics.jsonl"),
    }  # fmt: skip
    command = [sys.executable, "-c", WRITE, PROJECT, NAME, json.dumps(rows(speed=2.0))]
    subprocess.run(command, check=True, env=env, cwd=folder, timeout=300)
    return paths


@pytest.mark.parametrize("kind", ["json", "wandb", "tensorboard"])
def test_every_logger_says_the_same(logged, kind):
    run = read_run(logged[kind], "on")
    assert run.column("step") == [1, 2, 3]
    assert run.column("rollout_seconds") == pytest.approx([5.0, 10.0, 15.0])
    assert run.column("generated_tokens") == [1001, 1002, 1003]
    assert run.column("reward") == pytest.approx([0.25, 0.5, 0.75])
    assert run.column("step_seconds") == pytest.approx([30.0] * 3)
    assert run.column("entropy") == pytest.approx([0.5, math.nan, 0.5], nan_ok=True)
    assert run.column("acceptance_rate") == pytest.approx([0.5] * 3)
    # The validation of the same step is not lost, nor are values that nobody asked for.
    for _, data in read_log(logged[kind]).records:
        assert data["val-core/demo/reward/mean@1"] == pytest.approx(0.5)
        assert data["filler/799"] == 799


def test_wandbs_file_is_read_to_its_last_record(logged, tmp_path):
    file = next(logged["wandb"].glob("wandb/offline-run-*/*.wandb"))
    data = file.read_bytes()
    assert len(data) > 2 * 32768, "records must run across the blocks of the format"
    records = list(wandb_records(file))
    log = read_log(file)
    assert read_log(file.parent) == log and read_log(logged["wandb"] / "wandb") == log
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(data[:-3])
    assert list(wandb_records(cut)) == records[:-1], "a record that is still being written"
    damaged = bytearray(data)
    damaged[40000] ^= 1
    (tmp_path / "bad.wandb").write_bytes(damaged)
    with pytest.raises(UserError, match=r"bad\.wandb: damaged at byte \d+"):
        list(wandb_records(tmp_path / "bad.wandb"))
    (tmp_path / "text.wandb").write_text("not wandb's")
    with pytest.raises(UserError, match="not a file of wandb"):
        read_log(tmp_path / "text.wandb")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("json", r"metrics\.jsonl:6: the last line is cut off"),
        ("wandb", r"\.wandb: the last record is cut off"),
        ("tensorboard", "tensorboard: step 3 was not logged to its end"),
    ],
)
def test_a_run_that_was_killed_is_read_as_far_as_it_is_whole(logged, tmp_path, caplog, kind, what):
    """Its last count is not written to its end; tensorboard has those before it."""
    run = tmp_path / kind
    shutil.copytree(logged[kind], run, ignore=shutil.ignore_patterns("latest-run"))
    (file,) = run.rglob({"json": "*.jsonl", "wandb": "run-*.wandb", "tensorboard": "*tfevents*"}[kind])
    data = file.read_bytes()
    place = data.rindex(b"spec_num_accepted_tokens")
    if kind == "wandb":  # which repeats it in a summary after
        place = data.rindex(b"spec_num_accepted_tokens", 0, place)
    file.write_bytes(data[: place + 5])
    result = compare(read_run(logged[kind], "off"), read_run(run, "on"))
    assert result.on.column("step") == result.off.column("step") == [1, 2]
    assert result.speedup.value == pytest.approx(1.0)
    (message,) = caplog.messages
    assert re.search(f"{what}, it is left out$", message)
    assert "Steps that only off has are left out: 3." in sentences(result)


def test_a_folder_with_nothing_or_too_much_is_named(logged, tmp_path):
    with pytest.raises(UserError, match="no log of a run in it"):
        read_log(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"several runs, name one of them: a\.jsonl, b\.jsonl"):
        read_log(tmp_path)
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        read_log(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: must be a file or a folder, no pipe"):
        read_log(tmp_path / "pipe")
    binary = next(logged["wandb"].glob("wandb/offline-run-*/*.wandb"))
    (tmp_path / "binary.jsonl").write_bytes(binary.read_bytes())
    with pytest.raises(UserError, match=r"binary\.jsonl:1: not a line of verl's file logger"):
        read_log(tmp_path / "binary.jsonl")


def test_a_run_that_wandb_resumed_has_several_folders(logged, tmp_path, monkeypatch):
    """As `compare --wandb` leaves it; another run beside it is too much, also in a relative folder."""
    file = next(logged["wandb"].glob("wandb/offline-run-*/*.wandb"))
    for i in range(2):
        (folder := tmp_path / "wandb" / f"offline-run-2026010{i}_000000-x").mkdir(parents=True)
        shutil.copy(file, folder / file.name)
    monkeypatch.chdir(tmp_path)
    assert [step for step, _ in read_log("wandb").records] == [1, 2, 3]
    (folder / file.name).rename(folder / "run-other.wandb")
    with pytest.raises(UserError, match="several runs, name one of them: offline-run-20260100_000000-x/run-"):
        read_log("wandb")


def write_run_off(file, update_seconds):
    """The slower run as JSON lines, with the training's time by the name `update_seconds`."""
    lines = "\n".join(json.dumps({"step": step, "data": data}) for step, data in rows(speed=1.0))
    file.write_text(lines.replace("NaN", "null").replace("timing_s/update_actor", update_seconds) + "\n")
    return str(file)


@pytest.mark.parametrize(
    ("source", "update_seconds", "figures"),
    [
        ("wandb", "timing_s/update_actor", {"speedup": 2.0, "drift": 1.0}),
        # Without the time of the training, the drift is not known.
        ("wandb/offline-run-*/*.wandb", "other", {"speedup": 2.0}),
    ],
)
def test_the_second_runs_summary_gets_table_and_picture(
    logged, tmp_path, monkeypatch, capsys, source, update_seconds, figures
):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out = tmp_path / "out"
    (on,) = logged["wandb"].glob(source)
    off = write_run_off(tmp_path / "off.jsonl", update_seconds)
    assert main(["compare", off, str(on), "--wandb", "--output", str(out)]) == 0
    (first,) = logged["wandb"].glob("wandb/offline-run-*/*.wandb")
    file = Path(capsys.readouterr().out.splitlines()[-1].removeprefix(" wandb: "), first.name)
    assert file.parent.parent != first.parent.parent, "a folder of its own"
    items = {}
    for record in wandb_records(file):
        assert record.WhichOneof("record_type") != "history", "the run's history must stay as it is"
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, f"run-{record.run.run_id}.wandb") == (PROJECT, first.name)
            assert (record.run.host, record.run.HasField("git")) == ("", False), "as it was started"
        for item in record.summary.update:
            items[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    added = {name.removeprefix("rollout_spec/"): items[name] for name in items if "rollout_spec/" in name}
    assert {name: added[name] for name in added.keys() - {"comparison", "report"}} == pytest.approx(figures)
    table = json.loads((file.parent / "files" / items["rollout_spec/comparison"]["path"]).read_text())
    assert table["columns"] == ["", "off", "on", "Change"]
    first = ["Rollout time per training step (s)", "Training step time (s)"]
    assert [row[0] for row in table["data"]][:2] == first
    picture = file.parent / "files" / items["rollout_spec/report"]["path"]
    assert picture.read_bytes() == (out / "report.png").read_bytes()
    assert not (file.parent / "files" / "requirements.txt").exists()


def test_a_run_that_wandb_does_not_know_takes_no_summary(logged, tmp_path, capsys):
    run = str(logged["json"])
    assert main(["compare", run, run, "--wandb", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out and not any(tmp_path.iterdir()), "it is said before any work"
    assert line.startswith(f"rollout-spec compare: --wandb: {run}: ")


class Api:
    """wandb's, which knows one run."""

    def run(self, path):
        if path != "e/p/abc123":
            raise ValueError("no such run")
        history = [{"_step": step, **data} for step, data in rows(speed=2.0) if len(data) > 1]
        return SimpleNamespace(scan_history=lambda: [*history, {"_step": None}])


def test_a_run_at_wandb_is_read_and_its_summary_added_to(tmp_path, monkeypatch, capsys, refused):
    opened = MagicMock(offline=False, url="https://wandb/e/p/runs/abc123")
    opened.__enter__.return_value = opened
    init = MagicMock(side_effect=[opened, wandb.Error("Run (gone) does not exist")])
    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(wandb, "init", init)
    missing = "e/p/none: no such file or folder, and as a run of wandb: no such run"
    with pytest.raises(UserError, match=missing):
        read_run("wandb:e/p/none", "on")
    off = write_run_off(tmp_path / "off.jsonl", "other")
    compared = ["compare", off, "e/p/abc123", "--wandb", "--output", str(tmp_path / "out")]
    assert main(compared) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(opened.url)
    (added,) = opened.summary.update.call_args.args
    assert added["rollout_spec/speedup"] == pytest.approx(2.0)
    asked = init.call_args.kwargs
    settings = asked.pop("settings")  # that leave how the run was started as it is
    assert (settings.program, settings.x_disable_meta) == ("", True)
    assert asked == {"entity": "e", "project": "p", "id": "abc123", "mode": "online", "resume": "must"}
    assert refused(*compared).startswith("rollout-spec compare: --wandb: Run (gone) does not exist")
