#!/usr/bin/env python
"""DeepScaleR for training and MATH-500 for validation, from the hub or from copies of their files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_io import Row, Source, main

# Tells verl how to score: the last \boxed{} against the answer.
DATA_SOURCE = "HuggingFaceH4/MATH-500"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
COLUMNS = ("problem", "answer")


def convert(row: Row, index: int) -> Row:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{row['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    main(
        train=Source("agentica-org/DeepScaleR-Preview-Dataset", "train", COLUMNS, convert),
        val=Source("HuggingFaceH4/MATH-500", "test", COLUMNS, convert),
        folder="data/grpo",
        help_=__doc__ or "",
    )
