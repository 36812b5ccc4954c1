"""For trainings: a batch, weight syncs that find samples at work, ends of samples that are written down."""

import asyncio
import os
from pathlib import Path

import verl.utils.tensordict_utils as tu
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from rollout_spec.trace import DIR_VARIABLE

LAST_PROMPT = 3  # of the training data
ENDED = "ended"  # the file of `note_ends`


class UntilInterrupted(SingleTurnAgentLoop):
    """It answers one of the prompts again and again, until a weight sync has interrupted the answer."""

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        versions = output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]
        if kwargs["extra_info"]["index"] == LAST_PROMPT and len(set(versions)) == 1:
            return await self.run(sampling_params, **kwargs)
        return output


def wait_for_work(server):
    """Let a weight sync find a request at work, on each server that has served since the one before."""
    abort = server.SpecHttpServer.abort_all_requests

    async def abort_at_work(self, *args, **kwargs):
        while self._windows.is_quiet and not self._windows.is_untouched:
            await asyncio.sleep(0.01)
        return await abort(self, *args, **kwargs)

    server.SpecHttpServer.abort_all_requests = abort_at_work


def note_ends(server):
    """Write down the samples whose ends a server is told, beside its recording."""
    end = server.SpecHttpServer.end_sample

    async def end_sample(self, sample):
        with (Path(os.environ[DIR_VARIABLE]).parent / ENDED).open("a") as file:
            file.write(f"{sample}\n")
        await end(self, sample)

    server.SpecHttpServer.end_sample = end_sample


def batch_of(prompts, indices, step, validate=False, **columns):
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tu.get_tensordict({"raw_prompt": asked, "uid": list("abcdef")[: len(asked)], **columns})
    if indices is not None:
        tu.assign_non_tensor_stack(batch, "index", indices)
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    return batch
