"""What a gate is told of an engine step."""

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step processes, known when it begins."""

    num_tokens: int  # drafts and prompts included; of the busiest of data-parallel ranks that step together
    # Of prompts, on our own rank. How many the busiest has it is not told, and takes it for as many.
    num_prompt_tokens: int = 0
    has_drafts: bool = False  # whether it verifies drafts, or waited for some
    number: int | None = None  # the same on all such ranks; None: the engine core steps by itself


@dataclasses.dataclass(frozen=True)
class EndedStep(Work):
    """A step that has ended: what it processed, and what came of it."""

    num_rows: int = 0  # that got tokens in it, the decoding ones; a partial prefill is none
    num_context: int = 0  # tokens that these rows have now
    num_new_tokens: int = 0  # that they got
    seconds: float | None = None  # None: nobody knows, the engine may have been without work before it
    promised: float = 0.0  # tokens, by the survivals of its drafts: `Choice.promised`, where they were given
    num_passes: int = 0  # that a model has run in it; 0: there is no model
    # Of a model's drafts, by place, [m] each: in what share of the rows the token there was verified, and in
    # what share accepted. None: there was nothing.
    model_shares: tuple[Floats, Floats] | None = None
