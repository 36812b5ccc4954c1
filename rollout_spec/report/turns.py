"""Rollouts with drafts off and on in turns, where a machine has no time to change; they are a report's headline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rollout_spec.report.responses import Agreement
from rollout_spec.report.runs import Estimate, plain


@dataclasses.dataclass(frozen=True)
class Turns:
    """Pairs of rollouts that served the same requests, first without drafts or first with them."""

    off: Estimate  # tokens per second
    on: Estimate
    speedup: Estimate  # on / off; its interval is of the pairs
    agreement: Agreement  # of the two sides' tokens
    seconds: Sequence[tuple[float, float]]  # of each pair, without and with drafts
    tokens_per_step: float  # with drafts
    acceptance_rate: float

    @property
    def num_pairs(self) -> int:
        return len(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        estimates = {name: getattr(self, name).to_dict() for name in ("off", "on", "speedup")}
        rates = {name: plain(getattr(self, name)) for name in ("tokens_per_step", "acceptance_rate")}
        return estimates | rates | {
            "agreement": dataclasses.asdict(self.agreement),
            "seconds": [list(pair) for pair in self.seconds],
        }  # fmt: skip

    def sentences(self) -> list[str]:
        """What they were, and whether their tokens were the same."""
        same, compared = self.agreement.num_identical, self.agreement.num_tokens
        equal = (
            f"All {compared:,} tokens were the same with drafts and without."
            if same == compared
            else f"{same:,} of {compared:,} tokens were the same with drafts and without, each response counted "
            "up to its first difference."
        )
        text = [
            f"How this was measured: after the trainings, two engines in one process served the training's prompts "
            f"in turn, drafts off and on, in {self.num_pairs} pairs, with the policy as it was before training. So "
            f"the machine had no time to change within a pair. {equal}"
        ]
        if math.isfinite(self.acceptance_rate):
            text.append(
                f"There {self.acceptance_rate:.1%} of the draft tokens were accepted, and a decode step gave "
                f"{self.tokens_per_step:.2f} tokens where plain decoding gives 1."
            )
        return text
