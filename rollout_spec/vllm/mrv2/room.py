"""A step's drafts in vLLM's SchedulerOutput, and the room that an `AheadScheduler` leaves for them there."""

from typing import Any

import numpy as np

from rollout_spec.drafting.drafts import Drafts
from rollout_spec.drafting.native import Int32Array


def drafts_in(output: Any, width: int) -> Drafts:
    """The drafts, in rows of `width`, of a scheduler that has waited for them; -1 stands for none."""
    given = output.scheduled_spec_decode_tokens
    lists = [[token for token in given.get(name, ()) if token >= 0] for name in output.num_scheduled_tokens]
    tokens = [draft + [0] * (width - len(draft)) for draft in lists]
    return Drafts(np.array(tokens, np.int32), np.array(list(map(len, lists)), np.int32))


def room_in(output: Any) -> Int32Array:
    """For how many draft tokens each of its requests has room."""
    given = output.scheduled_spec_decode_tokens
    return np.array([len(given.get(name, ())) for name in output.num_scheduled_tokens], np.int32)


def fill_room(output: Any, drafts: Drafts) -> None:
    """Put drafts where there is room for them, and take away the room that stays empty.

    `output` is the runner's own. The scheduler's stays as it is: that takes back the tokens for which there
    was room, and that were not accepted.
    """
    names, nums = [*output.num_scheduled_tokens], np.array([*output.num_scheduled_tokens.values()], np.int32)
    nums += drafts.lengths - room_in(output)
    of_names = zip(names, drafts.lists(), strict=True)
    output.scheduled_spec_decode_tokens = {name: draft for name, draft in of_names if draft}
    output.num_scheduled_tokens = dict(zip(names, nums.tolist(), strict=True))
    output.total_num_scheduled_tokens = int(nums.sum())
