"""A model that drafts with vLLM's own speculator of model runner V2 (MTP, EAGLE, a draft model). An adapter.

Its tokens are drawn with the noise that the target draws with at their positions. So they are accepted as
often as two distributions that share their noise agree, which is near the most that is possible.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.patches import Patch, guard_parameters, record
from rollout_spec.vllm import versions_v2

SHARED_NOISE = Patch(
    name="vllm-v2-shared-noise",
    reason="vLLM drafts the likeliest tokens, or draws with noise of their own: both are less often accepted "
    "than tokens drawn with the target's noise, which coupled verification allows; used by engines with "
    "rollout.spec.verify=coupled and a model drafter only",
    upstream="vllm/v1/worker/gpu/spec_decode/speculator.py, DraftModelSpeculator.sample_draft",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)


def check_speculator() -> None:
    """See that the installed vLLM's speculators draw their tokens as this module was written for.

    Raises:
        PatchError: they do not.
    """
    for owner, name, accepted in versions_v2.SAMPLE_DRAFT:
        guard_parameters(SHARED_NOISE, owner, name, *accepted)


def share_noise(speculator: DraftModelSpeculator) -> None:
    """Let a speculator draw with the target's noise; once in its life, before its graphs are captured."""
    check_speculator()

    def sample_draft(hidden_states: torch.Tensor, *given: Any) -> torch.Tensor:
        positions, idx_mapping, temperature, seeds, *_ = given
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = speculator.model.compute_logits(hidden_states)
        return versions_v2.draw_as_target(speculator, logits, positions, idx_mapping, temperature, seeds)

    speculator.sample_draft = sample_draft
    record(SHARED_NOISE)
