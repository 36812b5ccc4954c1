"""What names of samples and calls say, lists in JSON: of a row of the training data, or of a first prompt."""

from typing import Any, NamedTuple

# What a name by the first prompt begins with: then the seed, the prompt's digest, a number.
BY_PROMPT = "prompt"


class RowName(NamedTuple):
    """The name of a row. A sample's has its number in the row after it; a call's begins with its sample's."""

    seed: int
    step: int  # the training step
    split: str  # train or val
    prompt_index: str  # in the file of data
    digest: str  # of the prompt
    occurrence: int  # how often the step had drawn this prompt before

    @property
    def group(self) -> str:
        return f"{self.prompt_index}:{self.digest}"


def split_of(name: Any) -> str | None:
    """`train` or `val`, of a sample or a call; None of a name that does not follow from a row's."""
    is_of_row = isinstance(name, (list, tuple)) and len(name) > 2 and name[2] in ("train", "val")
    return name[2] if is_of_row else None


def is_repeated(name: Any) -> bool:
    """Whether a run with the same seed and data gives a sample or call this name again, in its training."""
    return split_of(name) == "train" or (isinstance(name, (list, tuple)) and name[:1] == [BY_PROMPT])
