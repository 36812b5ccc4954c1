"""Step times of devices that one does not have, predicted; no device has confirmed them.

In: a policy's config.json and the name of a device. Out: `Times` of its engine's steps.
May import: rollout_spec.
"""
