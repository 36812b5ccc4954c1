"""What a gate is told of an engine step."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Step(NamedTuple):
    """A step: what it processes, known when it begins; then what came of it, known when it has ended."""

    num_tokens: int  # drafts and prompts included; of the busiest of data-parallel ranks that step together
    num_prompt_tokens: int = 0  # of these
    has_drafts: bool = False  # whether it verifies drafts, or waited for some
    number: int | None = None  # the same on all such ranks; None: the engine core steps by itself
    num_rows: int = 0  # that got tokens in it, the decoding ones; a partial prefill is none
    num_context: int = 0  # tokens that these rows have now
    num_new_tokens: int = 0  # that they got
    seconds: float | None = None  # None: nobody knows, the engine may have been without work before it
    promised: float = 0.0  # tokens, by the survivals of its drafts: `Choice.promised`, where they were given
    num_passes: int = 0  # of a model, each for a token of every row, to be verified in the next step
    # Of a model's drafts, by place, [m] each: in what share of the rows the token there was verified, and in
    # what share accepted. None: there was nothing.
    model_shares: tuple[Floats, Floats] | None = None
    ended: float | None = None  # when it did, by the drafter's clock; None: just now
