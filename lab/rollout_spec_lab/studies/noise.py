"""The noise of verification as a stream of 32-bit words, for a battery of statistical tests:

    python lab/rollout_spec_lab/studies/noise.py [FIRST] | dieharder -g 200 -d 0

The words of one response after the other, of one token after the other, as an engine with a vocabulary of
32,000 draws them. FIRST is the number of the first response.
"""

from __future__ import annotations

import sys
from itertools import count

import numpy as np
import torch

from rollout_spec.verification import coupled, noise

POSITIONS = np.arange(1024)  # of each response


def main() -> None:
    torch.set_num_threads(1)
    num_words = coupled.num_drawn(32_000)
    for sample in count(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        keys = np.full_like(POSITIONS, noise.make_key("a run", 1, sample // 8, sample % 8))
        words = noise.random_words(noise.row_seeds(keys, POSITIONS), num_words, torch.device("cpu"))
        try:
            sys.stdout.buffer.write(words.numpy().astype(np.uint32).tobytes())
        except BrokenPipeError:  # the battery has read enough
            sys.stderr.close()
            return


if __name__ == "__main__":
    main()
