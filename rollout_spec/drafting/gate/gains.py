"""What drafts give, learned while the engine runs."""

import numpy as np

from rollout_spec.drafting.gate.step import Floats
from rollout_spec.drafting.gate.step_seconds import FIRST_STEPS, MEMORY

PRIOR_TOKENS = 8.0  # the weight of the belief that what survivals promise comes true
WORTH = 2.0  # a model's token must give so many times what its time gives otherwise: the text gives some too


class DraftGains:
    """How much of what survivals promise is accepted, and what each token of a model's draft brings.

    most_model_tokens: the most that the model drafts for a row, a pass for each; 0: there is no model.
    """

    def __init__(self, most_model_tokens: int) -> None:
        self._promised = self._accepted = 0.0
        self._of_passes = np.ones(most_model_tokens)  # tokens a row
        self._weights = np.full(most_model_tokens, float(FIRST_STEPS))

    @property
    def share_kept(self) -> float:
        """The share of the tokens promised by survivals that was accepted of late."""
        return (PRIOR_TOKENS + self._accepted) / (PRIOR_TOKENS + self._promised)

    def learn(self, promised: float, num_accepted: int) -> None:
        """A step has ended: of its drafts so many tokens were promised, and so many accepted.

        Without drafts the correction fades, or what once broke its promise would never be tried again.
        """
        keep = 1.0 - 1.0 / MEMORY
        self._promised = keep * self._promised + promised
        self._accepted = keep * self._accepted + num_accepted

    def learn_passes(self, gains: Floats) -> None:
        """A step has verified a model's drafts; gains: [m], tokens a row that each of its tokens brought."""
        seen, unseen = slice(len(gains)), slice(max(1, len(gains)), None)
        self._weights[seen] = np.minimum(self._weights[seen] + 1.0, MEMORY / 8)
        self._of_passes[seen] += (gains - self._of_passes[seen]) / self._weights[seen]
        # It brings at most what the one before it brings, and is tried again when it may be worth its pass.
        before = self._of_passes[unseen.start - 1 : -1]
        self._of_passes[unseen] += (before - self._of_passes[unseen]) / (4 * MEMORY)

    def num_model_tokens(self, cost: float) -> int:
        """How many tokens pay, where the time of a pass would give `cost` tokens a row otherwise.

        The first always does: its pass runs anyway, since it keeps the model's KV cache complete.
        """
        pays = self._of_passes[1:] >= WORTH * cost
        return min(len(self._of_passes), 1 + int(np.argmin(np.append(pays, False))))
