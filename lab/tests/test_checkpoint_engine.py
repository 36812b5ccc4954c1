"""Weights over gloo, between processes as verl has them: an actor that sends, another one, two engines."""

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, str | None]]:
    """By case, the error of each process. 0 sends, 2 and 3 receive.

    Nobody waits for a time-out, which is longer than a report is waited for.
    """
    command = [sys.executable, "-m", "lab.tests.transfers"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_engine_gets_every_weight_in_every_sync(reports: Any) -> None:
    assert reports["well"] == dict.fromkeys("0123")


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("fails", {"0": "ValueError: no such shard", "2": "no such shard", "3": "no such shard"}),
        ("raises", {"0": "broke off at rank 0", "2": "KeyError", "3": "broke off at rank 2"}),
        ("dies", {"0": "broke off at rank 0", "3": "broke off at rank 2"}),
    ],
)
def test_who_fails_fails_all_the_others_at_once(case: str, messages: dict[str, str], reports: Any) -> None:
    for process, message in messages.items():
        error = reports[case][process]
        assert error is not None and message in error, (process, error)
