#!/usr/bin/env python
"""DAPO-Math-17k for training and AIME 2024 for validation, from the hub or from copies of their files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets_io import Row, Source, main

# Both are in verl's format already, every prompt many times over.
COLUMNS = ("data_source", "prompt", "reward_model")


def convert(row: Row, index: int) -> Row:
    return {
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "ability": "math",
        "reward_model": row["reward_model"],
        "extra_info": {"index": index},
    }


if __name__ == "__main__":
    main(
        train=Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", COLUMNS, convert),
        val=Source("BytedTsinghua-SIA/AIME-2024", "train", COLUMNS, convert),
        folder="data/dapo",
        help_=__doc__ or "",
    )
