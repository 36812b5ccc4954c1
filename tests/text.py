"""Text to draft from, without a model."""

from __future__ import annotations

import numpy as np


def speak(rng, length, num_words=400, alphabet=300):
    """Text with a wording: random words of a fixed vocabulary, so that contexts and matches both occur."""
    words = np.random.default_rng(5).integers(0, alphabet, (num_words, 4))
    chosen = words[np.minimum(rng.zipf(1.3, length), num_words) - 1]
    return chosen.reshape(-1)[:length].astype(np.int32)
