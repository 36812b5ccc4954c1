"""Run as a program, as `interpreted_model`: a model drafts beside the text on V2, in two small engines."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

if __name__ == "__main__":
    import tests.engine.interpreted_triton  # noqa: F401 (before all others)

from tests.engine.interpreted_model import both
from tests.engine.interpreted_runner import run

NAMES = ("sampled", "one", "greedy")


def main(models: str, output: str) -> None:
    pathlib.Path(output).write_text(json.dumps(served_in_brief(pathlib.Path(models))))


def served_in_brief(models: pathlib.Path) -> dict[str, Any]:
    target, eagle = str(models / "target"), {"method": "eagle", "model": str(models / "eagle")}
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 5, "max_model_len": 80, "max_num_seqs": 4}
    return {
        "plain": run(target, None, names=NAMES),
        "preempted": both(
            target, eagle, {"batch_threshold": 1}, names=NAMES, async_scheduling=True, **few_blocks
        ),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
