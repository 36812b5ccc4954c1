"""The same run through each of verl's own loggers, read back; and what cannot be read."""

from __future__ import annotations

import http.server
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from rollout_spec.report.comparison import sentences
from rollout_spec.report.logs import RunError, read_log
from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run

SPEC = "rollout/spec_"
NUM_STEPS = 3
PROJECT, NAME = "logs", "on"


# verl's tracker writes what the tests read, with two loggers at once, in a process of its own.
WRITE = """
import json, sys
from verl.utils.tracking import Tracking

project, name, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tracker = Tracking(project, name, ["tensorboard", "file"], config={"trainer": {}})
for step, data in rows:
    tracker.log(data=data, step=step)
tracker.finish()
"""


def rows(speed: float) -> list[tuple[int, dict[str, float]]]:
    """Of each step a validation's line, then the training's, with a NaN and many keys."""
    written: list[tuple[int, dict[str, float]]] = []
    for step in range(1, NUM_STEPS + 1):
        written.append((step, {"val-core/demo/reward/mean@1": 0.5}))
        training = {
            SPEC + "rollout_seconds": 10.0 * step / speed,
            SPEC + "generated_tokens": 1000.0 + step,
            SPEC + "tokens_per_step": 1.5,
            SPEC + "num_draft_tokens": 40.0,
            SPEC + "num_accepted_tokens": 20.0,
            "timing_s/gen": 40.0,
            "timing_s/update_actor": 12.0,
            "perf/total_num_tokens": 2000.0,
            "timing_s/step": 30.0,
            "critic/rewards/mean": 0.25 * step,
            "response_length/mean": 64.0,
            "actor/entropy": math.nan if step == 2 else 0.5,
        }
        written.append((step, training | {f"filler/{i}": float(i) for i in range(800)}))
    return written


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Folders of one run by kind of log."""
    folder = tmp_path_factory.mktemp("logged")
    paths = {kind: folder / kind for kind in ("json", "tensorboard")}
    for path in paths.values():
        path.mkdir()
    env = {
        **os.environ,
        "TENSORBOARD_DIR": str(paths["tensorboard"]),
        "VERL_FILE_LOGGER_PATH": str(paths["json"] / "metrics.jsonl"),
    }
    command = [sys.executable, "-c", WRITE, PROJECT, NAME, json.dumps(rows(speed=2.0))]
    subprocess.run(command, check=True, env=env, cwd=folder, timeout=300)
    return paths


@pytest.mark.parametrize("kind", ["json", "tensorboard"])
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


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("json", r"metrics\.jsonl:6: the last line is cut off"),
        ("tensorboard", "tensorboard: step 3 was not logged to its end"),
    ],
)
def test_a_run_that_was_killed_is_read_as_far_as_it_is_whole(logged, tmp_path, caplog, kind, what):
    """Its last count is not written to its end; tensorboard has those before it."""
    run = tmp_path / kind
    shutil.copytree(logged[kind], run)
    (file,) = run.rglob({"json": "*.jsonl", "tensorboard": "*tfevents*"}[kind])
    data = file.read_bytes()
    place = data.rindex(b"spec_num_accepted_tokens")
    file.write_bytes(data[: place + 5])
    result = compare(read_run(logged[kind], "off"), read_run(run, "on"))
    assert result.on.column("step") == result.off.column("step") == [1, 2]
    assert result.speedup == pytest.approx(1.0)
    (message,) = caplog.messages
    assert re.search(f"{what}, it is left out$", message)
    assert "Steps that only off has are left out: 3." in sentences(result)


def test_a_folder_with_nothing_or_too_much_is_named(tmp_path):
    with pytest.raises(RunError, match="no log of a run in it"):
        read_log(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=r"several runs, name one of them: a\.jsonl, b\.jsonl"):
        read_log(tmp_path)
    with pytest.raises(RunError, match="nowhere: no such file or folder"):
        read_log(tmp_path / "nowhere")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(RunError, match=r"binary\.jsonl:1: not a line of verl's file logger"):
        read_log(tmp_path / "binary.jsonl")


class WandbServer(http.server.BaseHTTPRequestHandler):
    """As much of wandb's server as wandb's own client asks for when it reads the run `abc123`."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        variables = query.get("variables") or {}
        names = {variables.get(key) for key in ("name", "runName", "run")}
        history = [json.dumps({"_step": step, **data}) for step, data in rows(speed=2.0) if len(data) > 1]
        run = {
            "id": "1", "name": "abc123", "displayName": NAME, "state": "finished", "projectId": "1",
            "historyLineCount": NUM_STEPS, "lastHistoryStep": NUM_STEPS, "tags": [], "config": "{}",
            "systemMetrics": "{}", "summaryMetrics": json.dumps({"before": 5}),
            "user": {"name": "u", "username": "u"},
            "historyKeys": {"lastStep": NUM_STEPS, "keys": {}, "sets": []}, "history": history,
            "parquetHistory": {"parquetUrls": [], "liveData": []},
        }  # fmt: skip
        data = {
            "project": {"id": "1", "internalId": "1", "run": run if "abc123" in names else None},
            "viewer": {"id": "1", "username": "u", "entity": "e", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"features": []},
        }
        self.answer(json.dumps({"data": data}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


# Reads a run, and one that is not there; prints what each gave.
READ = """
import json
from rollout_spec.report.logs import RunError
from rollout_spec.report.runs import read_run

found = []
for run in ("e/p/abc123", "wandb:e/p/none"):
    try:
        found.append(read_run(run, "on").column("rollout_seconds"))
    except RunError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_an_online_run_is_read_with_wandbs_own_client(tmp_path):
    """In a process of its own: wandb's client keeps one service in each."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {
            **os.environ,
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "WANDB_API_KEY": "0" * 40,
            **dict.fromkeys(("WANDB_DIR", "WANDB_CACHE_DIR"), str(tmp_path)),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
        }
        done = subprocess.run(
            [sys.executable, "-c", READ], env=env, capture_output=True, text=True, timeout=240
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    read, unknown = json.loads(done.stdout.splitlines()[-1])
    assert read == [5.0, 10.0, 15.0]
    assert "e/p/none: no such file or folder, and as a run of wandb: " in unknown
