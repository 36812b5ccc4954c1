"""The C tests of native/, plain and under the address and undefined-behaviour sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("target", ["lint", "test", "asan"])
def test_make(target, tmp_path):
    """With the user's compiler: CC may be a command of several words, such as `ccache gcc`."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec "$@"\n')
    wrapper.chmod(0o755)
    command = ["make", "-C", str(Path(__file__).resolve().parents[2] / "native"), target, f"BUILD={tmp_path}"]
    env = {**os.environ, "CC": f"{wrapper} {os.environ.get('CC', 'cc')}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "used").exists()
