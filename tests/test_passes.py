"""How many passes a model takes, by themselves; in whole rollouts they are in test_simulate."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafting.gate.passes import RETRY_EVERY, TRY_EVERY, Passes


class Model:
    """Each further pass takes a share of a plain step's time, and brings so many tokens a row.

    Both are measured with noise, a tenth of the step's time and as much as a pass's token brings.
    """

    def __init__(self, gains: list[float], share: float, seed: int = 0) -> None:
        self.passes, self.gains, self.share = Passes(1 + len(gains)), gains, share
        self._random = np.random.default_rng(seed)

    def steps(self, num: int) -> list[int]:
        """The passes of each."""
        return [self._step() for _ in range(num)]

    def _step(self) -> int:
        passes, noise = self.passes, self._random.normal(size=2)
        num = passes.num
        passes.learn_share(num, (num - 1) * self.share + 0.1 * noise[0])
        if passes.weighs(num):
            passes.learn_gain(num, self.gains[num - 2] * (1 + noise[1]))
        passes.choose(2.0)
        return num


@pytest.mark.parametrize(
    ("gains", "share", "best"),
    [
        ([0.4, 0.3], 0.05, 3),
        ([0.4, 0.01], 0.1, 2),
        ([0.05, 0.04], 0.3, 1),
        ([-0.01, -0.01], 0.05, 1),  # a wrong head
        ([0.4, 0.3, 0.2, 0.1, 0.01], 0.1, 4),
        ([], 0.1, 1),
    ],
)
def test_passes_run_that_pay(gains: list[float], share: float, best: int) -> None:
    model = Model(gains, share)
    model.steps(1500)
    taken = model.steps(10 * RETRY_EVERY)
    assert taken.count(best) > 0.95 * len(taken)


def test_all_passes_run_until_what_they_take_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no step can be compared."""
    model = Model([-0.1, -0.1], 0.3)
    assert set(model.steps(2 * TRY_EVERY)) == {2, 3}
    monkeypatch.setattr(model.passes, "learn_share", lambda num, excess: None)
    assert set(model.steps(500)) == {2, 3}


def test_a_head_that_gets_better_or_worse_is_noticed() -> None:
    model = Model([0.4, 0.3], 0.1)
    for gains, best in (([0.0, 0.0], 1), ([0.4, 0.3], 3), ([0.0, 0.0], 1)):
        model.gains = gains
        model.steps(3000)
        assert model.steps(RETRY_EVERY).count(best) >= RETRY_EVERY - 1
