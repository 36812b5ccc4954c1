"""The C tests of native/, plain and under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"


@pytest.mark.parametrize("target", ["lint", "test", "asan"])
def test_make(target, tmp_path):
    done = subprocess.run(
        ["make", "-C", str(NATIVE), target, f"BUILD={tmp_path}"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
