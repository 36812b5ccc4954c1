"""An agent loop for tests/test_async_training.py: at each weight sync some of its samples are at work."""

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
