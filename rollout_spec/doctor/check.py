"""A line of what `doctor` says."""

from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
GPU_CHECK = "`rollout-spec-lab gpu-check` (from a clone: pip install ./lab)"


class Check(NamedTuple):
    name: str
    status: str
    detail: str
    fix: str = ""
