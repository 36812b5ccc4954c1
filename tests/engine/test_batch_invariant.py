"""vLLM's batch-invariant mode in a pass that verifies, as far as Triton's interpreter can show it."""

from __future__ import annotations

import pathlib

import pytest

from tests.engine.test_runner_v2 import interpreted


@pytest.mark.long
@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_row_alone_has_the_bits_that_it_has_in_a_pass_over_a_draft(
    tmp_path: pathlib.Path, mode: str
) -> None:
    """Without the mode, attention splits the keys of a row with one query token: another order of sums."""
    file = tmp_path / "found.json"
    found = interpreted("tests.engine.interpreted_invariant", file, VLLM_BATCH_INVARIANT=mode)
    assert [name for name, is_same in found.items() if not is_same] == ([] if mode == "1" else ["attention"])
    assert {"norm", "log_softmax", "product torch.bfloat16"} <= found.keys()
