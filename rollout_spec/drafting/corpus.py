"""A corpus: texts to draft from besides those of the groups. They are the responses of recorded rollouts."""

from rollout_spec.config import ConfigError, UserError
from rollout_spec.drafting.native import Int32Array
from rollout_spec.trace import read_trace


def read_corpus(path: str) -> list[Int32Array]:
    """The responses in the file that `rollout.spec.corpus` names, int32 vectors of at least one token.

    Raises ConfigError: the file cannot be read, holds no recorded rollouts, or no token.
    """
    try:
        texts = [text for line in read_trace(path) for text in line.responses if len(text)]
    except (OSError, UserError) as error:
        message = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"rollout.spec.corpus={path!r}: {message}") from error
    if not texts:
        raise ConfigError(f"rollout.spec.corpus={path!r}: no token in any response")
    return texts
