"""For tests/test_async_training.py: each weight sync finds samples at work, however fast the engine is."""

import asyncio

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

LAST_PROMPT = 3  # of the training data


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
