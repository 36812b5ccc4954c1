"""Two ranks on vLLM's MRV2, on the CPU: data-parallel ones with experts, or tensor-parallel ones."""

import asyncio

from rollout_spec.patches import when_imported
from tests.engine.conftest import KEYED, close, engine_settings
from tests.engine.interpreted_runner import LATE, PROMPT, serve_named
from tests.engine.serving import Request, sampling, serve

EXTENSION = "tests.engine.interpreted_ranks.Extension"
# The rank of each, and how many tokens it gets: the first rank's gate is closed while it has three of them.
REQUESTS = [(0, 24), (0, 36), (0, 48), (1, 40)]


class Extension:
    """A look inside a worker; `note_passes` says what its passes are, `note_drafts` what they verify."""

    def note_drafts(self):
        update, self.steps = self.model_runner.update_requests, []

        def update_and_note(output):
            update(output)
            self.steps.append(output)

        self.model_runner.update_requests = update_and_note

    def noted_drafts(self):
        return [dict(step.scheduled_spec_decode_tokens) for step in self.steps]

    def noted_passes(self):
        return "".join(self.passes)

    def last_step_of_the_ranks(self):
        work = self.model_runner.rollout_spec_proposer.busiest_work
        return work.number, work.num_tokens

    def counters(self):
        return self.model_runner.rollout_spec_proposer.take_counters().to_dict()

    def notes_of_graphs(self):
        from tests.engine import interpreted_cuda

        return interpreted_cuda.take_notes()


def note_passes(cpu_worker):
    """Let a worker note its passes: s for a step with requests, d for a dummy batch."""
    import tests.engine.cpu_collectives  # noqa: F401

    worker = cpu_worker.CPUWorker
    if hasattr(worker, "passes"):  # of this module as the process's program
        return
    worker.passes = ()
    for name, letter in (("execute_model", "s"), ("execute_dummy_batch", "d")):
        setattr(worker, name, noting(getattr(worker, name), letter))


def noting(method, letter):
    def note(self, *args):
        if not args or args[0].total_num_scheduled_tokens:
            self.passes = (*self.passes, letter)
        return method(self, *args)

    return note


when_imported("vllm.v1.worker.cpu_worker", note_passes)  # in the processes of the ranks, which import this


def params(i):
    return sampling({"max_tokens": REQUESTS[i][1], "detokenize": False}, key=["V2", i])


def plain(model):
    from vllm import LLM

    llm = LLM(**engine_settings(model) | KEYED)
    found = serve(llm, [Request(PROMPT, params(i)) for i in range(len(REQUESTS))])
    close([llm])
    return [one["tokens"] for one in found]


async def ranks(model, **more):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout_spec.vllm.engine_cores import EngineCores

    settings = engine_settings(model, {"batch_threshold": 2})
    settings |= {"data_parallel_size": 2, "async_scheduling": True, "distributed_executor_backend": "uni"}
    settings["worker_extension_cls"] = EXTENSION
    config = AsyncEngineArgs(**settings | more).create_engine_config()
    assert config.use_v2_model_runner
    engine = AsyncLLM.from_vllm_config(config)

    async def respond(i):
        prompt, rank = {"prompt_token_ids": PROMPT}, REQUESTS[i][0]
        async for output in engine.generate(prompt, params(i), f"{i}", data_parallel_rank=rank):
            [sample] = output.outputs
        return list(sample.token_ids)

    try:
        responses = await asyncio.gather(*map(respond, range(len(REQUESTS))))
        cores = EngineCores(engine)

        async def ask(method):
            return [(await cores.call_workers(core, method))[0] for core in range(2)]

        passes, before = await ask("noted_passes"), [""]
        while passes != before or len(passes[0]) != len(passes[1]):  # until the ranks rest
            await asyncio.sleep(0.5)
            passes, before = await ask("noted_passes"), passes
        last_step, counters = await ask("last_step_of_the_ranks"), await ask("counters")
        notes = await ask("notes_of_graphs") if more else None
        found = {"requests": responses, "passes": passes, "last_step": last_step, "counters": counters}
        return found | {"notes": notes}
    finally:
        engine.shutdown()


def tensor_parallel(model, spec, **more):
    from vllm import LLM

    settings = engine_settings(model, spec) | ({} if spec is not None else KEYED)
    settings |= {"max_model_len": 256, "max_logprobs": -1, "skip_tokenizer_init": False}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "async_scheduling": True}
    llm = LLM(**settings | ranks | more, worker_extension_cls=EXTENSION)
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    llm.collective_rpc("note_drafts")
    found = {"requests": serve_named(llm, ("unnamed", "greedy", "sampled", "top_k", *LATE))}
    found["drafts"] = llm.collective_rpc("noted_drafts")
    if spec is not None:
        found["num_failed_steps"] = llm.collective_rpc("counters")[0]["num_failed_steps"]
    if more:
        found["notes"] = llm.collective_rpc("notes_of_graphs")
    close([llm])
    return found


def main(model, kind):
    if kind == "tensor-parallel":
        return {name: tensor_parallel(model, spec) for name, spec in (("plain", None), ("drafted", {}))}
    return {"plain": plain(model), "ranks": asyncio.run(ranks(model))}
