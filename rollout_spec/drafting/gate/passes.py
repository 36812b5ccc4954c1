"""How many passes of a model's draft pay beside the text."""

from collections import deque

import numpy as np
import numpy.typing as npt

TRY_EVERY = 16  # one in so many steps with model drafts runs a pass more or fewer, to time a pass
RETRY_EVERY = 64  # the same once enough was measured
ENOUGH = 8  # measurements of what a pass takes, and of what its token brings, before it is judged
MEMORY = 64  # measurements after which most is forgotten
# Benefit / cost below which the last pass is dropped, above which one is added. Both are above 1, because the
# text would have given many of these tokens too.
LEAST_WORTH, MOST_WORTH = 2.0, 2.6


class Passes:
    """Chooses how many passes a model takes: one for each token of its draft.

    The first always runs, since it keeps the model's KV cache complete. A further one pays where the accepted
    tokens that it gives are worth more than its time. They are counted in every step with drafts. What a pass
    takes shows in steps that have one more or fewer than the step before; now and then there is one.

    Args:
        most_model_tokens: the most tokens that the model drafts for a row; 0: there is no model.

    Attributes:
        num: passes of the next step that waits for drafts.
    """

    def __init__(self, most_model_tokens: int) -> None:
        self._most = self._settled = self.num = most_model_tokens
        self._steps_left = TRY_EVERY  # until the next try
        self._share, self._shares = 0.0, deque[float](maxlen=MEMORY)  # of a plain step's time, for a pass
        self._last = 0, 0.0  # passes of the last step with drafts, and its excess
        self._gains, self._weights = np.zeros((2, self._most + 2))  # of each pass's token, in tokens a row

    def learn_share(self, num: int, excess: float) -> None:
        """A step with drafts has ended.

        num: the model's passes in it.
        excess: how much longer it took than expected with one pass, relative to a plain step, because a
            pass and a step grow together with the batch.
        """
        last_num, last_excess = self._last
        if last_num and num != last_num:
            self._shares.append((excess - last_excess) / (num - last_num))
            self._share = float(np.median(self._shares))
        self._last = num, excess

    def learn_gains(self, gains: npt.NDArray[np.float64]) -> None:
        """A step has verified a model's drafts; gains: [m], tokens a row that each of its tokens brought."""
        nums = slice(1, 1 + len(gains))
        self._weights[nums] = np.minimum(self._weights[nums] + 1.0, MEMORY)
        self._gains[nums] += (gains - self._gains[nums]) / self._weights[nums]

    def choose(self, tokens_per_row: float) -> None:
        """The number for the next step, once in each for which the model has drafted.

        tokens_per_row: what the time of a plain step would give otherwise.
        """
        if self._most < 2:
            return
        cost, last, further = self._share * tokens_per_row, self._settled, self._settled + 1
        if self._is_known(last) and self._gains[last] < LEAST_WORTH * cost:
            self._settled = last - 1
        elif self._is_known(further) and self._gains[further] > MOST_WORTH * cost:
            self._settled = further
        self.num = self._settled
        self._steps_left -= 1
        if self._steps_left == 0:
            self.num += 1 if self._settled < self._most else -1
            is_known = all(self._is_known(each) for each in (last, further) if 1 < each <= self._most)
            self._steps_left = RETRY_EVERY if is_known else TRY_EVERY

    def _is_known(self, num: int) -> bool:
        """Whether the token of that pass, a further one, can be judged."""
        return 1 < num <= self._most and self._weights[num] >= ENOUGH and len(self._shares) >= ENOUGH
