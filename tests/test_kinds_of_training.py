"""Trainings of other kinds than the demo's, two steps each."""

from __future__ import annotations

import pathlib

import pytest

from tests.tiny_vl import make_tiny_vl
from tests.trainings import make_image_data, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_prompts_with_images(tmp_path: pathlib.Path) -> None:
    """Before the first update the tokens are those without drafts, so the rewards are."""
    rewards = []
    for method in ("off", "sam"):
        folder = tmp_path / method
        folder.mkdir()
        images = make_image_data(folder)
        model = pathlib.Path(make_tiny_vl(folder / "vl"))
        options = ["rollout.spec.verify=coupled", f"data.train_files={images}", f"data.val_files={images}"]
        first, _ = train(folder, model, *options, "data.image_key=images", method=method)
        rewards.append(first["critic/rewards/mean"])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
