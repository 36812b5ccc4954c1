"""What the names of samples and of their calls say, lists in JSON.

A sample's name is of a row of the trainer's data, or by its first prompt. The name of a call begins with it.
"""

from typing import Any, NamedTuple

# What a name by the first prompt begins with: then the seed, the prompt's digest, a number.
BY_PROMPT = "prompt"


class RowName(NamedTuple):
    """The name of a row; its sample's number in the row comes after it."""

    seed: int
    step: int  # the training step
    split: str  # train or val
    prompt_index: str  # in the file of data
    digest: str  # of the prompt
    occurrence: int  # how often the step had drawn this prompt before

    @property
    def group(self) -> str:
        return f"{self.prompt_index}:{self.digest}"


def call_name(sample: Any, *of_call: Any) -> list[Any]:
    """The name of a call: that of its sample, which may be a user's own, then what is the call's own."""
    return [*(sample if isinstance(sample, (list, tuple)) else [sample]), *of_call]


def split_of(name: Any) -> str | None:
    """`train` or `val`, of a sample or a call; None of a name that does not follow from a row's."""
    is_of_row = isinstance(name, (list, tuple)) and len(name) > 2 and name[2] in ("train", "val")
    return name[2] if is_of_row else None


def is_repeated(name: Any) -> bool:
    """Whether a run with the same seed and data gives a sample or call this name again, in its training."""
    return split_of(name) == "train" or (isinstance(name, (list, tuple)) and name[:1] == [BY_PROMPT])
