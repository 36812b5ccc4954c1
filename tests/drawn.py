"""What a plain step draws: the oracle of whatever a step with drafts keeps."""

from rollout_spec.verification.coupled import StepNoise


def keyed_sample(logits, keys, positions):
    return StepNoise(keys, positions, [0] * len(logits)).sample_after(logits)
