"""How far rows are computed: recurrent layers need to know."""

from typing import Any

import numpy as np
import numpy.typing as npt


def in_prompt(runner: Any) -> npt.NDArray[np.bool_]:
    """Which rows of an MRV1 still compute their prompt, or their own tokens again."""
    batch = runner.input_batch
    return batch.num_computed_tokens_cpu[: batch.num_reqs] < num_known(batch)


def num_known(batch: Any) -> npt.NDArray[np.int32]:
    """Tokens to compute before each row decodes: its prompt, and its own tokens but the last."""
    n = batch.num_reqs
    return np.maximum(batch.num_prompt_tokens[:n], batch.num_tokens_no_spec[:n] - 1)
