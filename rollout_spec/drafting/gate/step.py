"""What a gate is told of an engine step that has ended."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Work(NamedTuple):
    """What a step processed; known when it begins."""

    num_tokens: int  # drafts and prompts included; of the busiest of data-parallel ranks that step together
    num_prompt_tokens: int = 0  # of these
    has_drafts: bool = False  # whether it verified drafts, or waited for some
    number: int | None = None  # the same on all such ranks; None: the engine core steps by itself


class ModelShares(NamedTuple):
    """What became of the m tokens that a model drafted for each row of a step, by their place in a draft."""

    verified: npt.NDArray[np.float64]  # [m]: the share of the rows in whose draft the step verified it
    accepted: npt.NDArray[np.float64]  # [m]: the share of the rows in which it was accepted


class Step(NamedTuple):
    """A step that has ended; the first fields are those of its `Work`."""

    num_tokens: int
    num_prompt_tokens: int
    has_drafts: bool
    number: int | None
    num_rows: int  # that got tokens in it, the decoding ones; a partial prefill is none
    num_context: int = 0  # tokens that these rows have now
    num_new_tokens: int = 0  # that they got
    seconds: float | None = None  # None: nobody knows, the engine may have been without work before it
    num_passes: int = 0  # of a model, each for a token of every row, to be verified in the next step
    model_shares: ModelShares | None = None  # what it verified of a model's drafts; None: there was nothing
