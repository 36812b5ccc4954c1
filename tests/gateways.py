"""For tests/test_any_manager.py: agent loop managers that are not verl's.

`Gateways` does what uni-agent does, and derives from nothing of verl's: it answers at once, its gateways are
processes of their own with copies of the client, a session has side requests beside its turns, and one dies.
`Derived` has workers of its own, which derive from verl's.
"""

import asyncio
import itertools
import os
import uuid

import ray
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask

from tests import faults

NUM_TURNS, NUM_TOKENS = 3, 24  # of a session, and of the policy in a turn


class Gateway:
    """Makes all calls of its sessions."""

    def __init__(self, client):
        self._client = client

    async def chat(self, session, prompt, params):
        output = await self._client.generate(session, prompt_ids=prompt, sampling_params=params)
        versions = (output.extra_fields[f"{end}_global_steps"] for end in ("min", "max"))
        return list(output.token_ids), *versions


class Framework:
    """Runs the sessions of a batch, and puts what they have said into verl's queue."""

    def __init__(self, config, gateways):
        from transformers import AutoTokenizer

        tq.init()
        self._config = config.actor_rollout_ref.rollout
        self._gateways = itertools.cycle(gateways)
        self._tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)

    async def generate_sequences(self, prompts):
        kind, step = "val" if tu.get(prompts, "validate", False) else "train", tu.get(prompts, "global_steps")
        names = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info")
        rows = zip(*(tu.get(prompts, name) for name in names), strict=True)
        await asyncio.gather(*(self._prompt(dict(zip(names, row, strict=True)), kind, step) for row in rows))

    async def _prompt(self, row, kind, step):
        num = self._config.n if kind == "train" else self._config.val_kwargs.n
        sessions = [self._session(row, kind, step, number) for number in range(num)]
        failed = [each for each in await asyncio.gather(*sessions, return_exceptions=True) if each]
        assert all("on purpose" in str(each) for each in failed), failed
        await tq.async_kv_put(key=row["uid"], partition_id=kind, tag={"status": "finished"})

    async def _session(self, row, kind, step, number):
        gateway, session = next(self._gateways), uuid.uuid4().hex
        params = {"temperature": self._config.temperature, "max_tokens": NUM_TOKENS, "ignore_eos": True}

        def ask(prompt):
            return gateway.chat.remote(session, prompt, dict(params))

        first = self._ids(list(row["raw_prompt"]), add_generation_prompt=True)
        text, mask, versions = list(first), [], []
        for turn in range(NUM_TURNS):
            said, oldest, newest = await ask(text)
            if turn == 0:
                if faults.FAULT in os.environ:
                    faults.compute_score("")
                await ask([*self._tokenizer.encode("A title for this:"), *first[:8]])
                if number == 0 and kind == "train" and row["extra_info"]["index"] == 0:
                    raise RuntimeError("a session dies on purpose")
            tool = self._tokenizer.encode("That was not checked. Copy it again:") * (turn + 1 < NUM_TURNS)
            text, mask = [*text, *said, *tool], [*mask, *len(said) * [1], *len(tool) * [0]]
            versions += [oldest, newest]
        fields, tag = self._sample(row, first, text, mask, step, number)
        tag |= {"min_global_steps": min(versions), "max_global_steps": max(versions)}
        keys, fields = [f"{row['uid']}_{number}_0"], tu.list_of_dict_to_tensordict([fields])
        await tq.async_kv_batch_put(keys=keys, fields=fields, tags=[tag], partition_id=kind)

    def _ids(self, messages, **options):
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self._tokenizer.encode(text)

    def _sample(self, row, prompt, text, mask, step, number):
        text, response, mask = (torch.tensor(each) for each in (text, text[len(prompt) :], mask))
        scores = torch.zeros(len(response))
        scores[-1] = float(response.sum() % 7)
        fields = row | {
            "prompts": text[: len(prompt)], "responses": response, "input_ids": text,
            "attention_mask": torch.ones_like(text), "response_mask": mask, "loss_mask": mask,
            "position_ids": compute_position_id_with_mask(torch.ones(1, len(text))).squeeze(0),
            "rm_scores": scores, "multi_modal_inputs": {}, "session_id": number, "global_steps": step,
            "num_turns": torch.tensor(2 * NUM_TURNS),
        }  # fmt: skip
        lengths = {"prompt_len": len(prompt), "response_len": len(response), "seq_len": len(text)}
        return fields, {"status": "success", "global_steps": step, "uid": row["uid"], **lengths}


class Gateways:
    """The manager: `generate_sequences` waits for nothing."""

    @classmethod
    def create(cls, *, config, llm_client, **_):
        manager = cls()
        gateways = [ray.remote(num_cpus=0)(Gateway).remote(llm_client) for _ in range(2)]
        manager.framework = ray.remote(num_cpus=0)(Framework).remote(config, gateways)
        return manager

    def generate_sequences(self, prompts):
        self.framework.generate_sequences.remote(prompts)


class DerivedWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)  # Ray copies an inherited one, in which verl's super() fails


class Derived(AgentLoopManagerTQ):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(DerivedWorker)
