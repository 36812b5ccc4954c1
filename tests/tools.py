"""What short trainings give to verl."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, **_: Any) -> float:
    """A score that differs."""
    return float(len(solution_str) % 7)
