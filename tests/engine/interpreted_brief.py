"""A model drafts beside the text on MRV2, in two small engines; as `interpreted_model`."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.engine.interpreted_model import both
from tests.engine.interpreted_runner import run

NAMES = ("sampled", "one", "greedy")


def main(models: str) -> dict[str, Any]:
    return served_in_brief(pathlib.Path(models))


def served_in_brief(models: pathlib.Path) -> dict[str, Any]:
    target, eagle = str(models / "target"), {"method": "eagle", "model": str(models / "eagle")}
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 5, "max_model_len": 80, "max_num_seqs": 4}
    return {
        "plain": run(target, None, names=NAMES),
        "preempted": both(
            target, eagle, {"batch_threshold": 1}, names=NAMES, async_scheduling=True, **few_blocks
        ),
    }
