"""For tests/test_any_manager.py: an agent for uni-agent, three turns with a tool, and a side request."""

import importlib
import os

from tests.gateways import NUM_TOKENS, NUM_TURNS


async def run(*, raw_prompt, session, sample_index, tools_kwargs=None, **_):
    import aiohttp

    async def post(url, body):
        async with http.post(url, json=body) as answer:
            assert answer.status < 400, await answer.text()
            return await answer.json()

    async def ask(messages):
        body = {"model": "policy", "messages": messages, "max_tokens": NUM_TOKENS}
        answer = await post(f"{session.base_url}/chat/completions", body)
        return answer["choices"][0]["message"]["content"]

    messages = [dict(message) for message in raw_prompt]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        for turn in range(NUM_TURNS):
            said = await ask(messages)
            if os.environ.get("ROLLOUT_SPEC_TEST_FAULT"):
                importlib.import_module("tests.faults").kill()
            if turn == 0:
                await ask([{"role": "user", "content": "A title for this: " + messages[-1]["content"][:40]}])
            checked = {"role": "user", "content": "That was not checked. Copy it again:"}
            messages += [{"role": "assistant", "content": said}, checked]
        await post(session.reward_info_url, {"reward_info": {"reward": len(said) % 7, "finished": True}})
