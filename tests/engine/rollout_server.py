"""verl's rollout server around an engine of the test's own process."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.vllm import SCHEDULER

EXTENSION = "rollout_spec.verl.worker_extension.SpecWorkerExtension"


@pytest.fixture
def server_of(monkeypatch):
    """`server_of(engine, spec)`: the server as it is; what upstream's does with Ray and HTTP is cut short."""
    from omegaconf import OmegaConf

    from rollout_spec.verl import server as verl_server

    def init(self, engine, spec, full_determinism=False, scheduler=SCHEDULER):
        options = {"vllm": {"scheduler_cls": scheduler, "additional_config": {"rollout_spec": spec}}}
        # Where MTP drafts, verl logs the drafts' metrics.
        mtp = {"enable": True, "enable_rollout": True}
        config = {"engine_kwargs": options, "seed": 0, "max_model_len": 512, "mtp": mtp}
        config |= {"full_determinism": full_determinism, "enable_rollout_routing_replay": False}
        self.config, self.model_config = OmegaConf.create(config), SimpleNamespace(processor=None, lora={})
        self.engine, self.replica_rank, self.node_rank, self.global_steps = engine, 3, 0, None
        self._disaggregation_role, self._submission_paused, self._admitting = "null", False, 0
        self._rejecting, self._resume_event = False, asyncio.Event()

    monkeypatch.setattr(verl_server.vLLMHttpServer, "__init__", init)
    monkeypatch.setattr(verl_server.vLLMHttpServer, "lora_as_adapter", False)
    return verl_server.SpecHttpServer


@pytest.fixture
def make_server(make_engine, server_of, monkeypatch):
    from verl.workers.rollout.vllm_rollout import utils

    class SteppedAsyncLLM:
        """As AsyncLLM is to verl's server: requests come and are aborted while the engine steps.

        Whoever waits for an output lets it step.
        """

        def __init__(self, llm):
            self.llm = llm
            self.output_processor = SimpleNamespace(request_states={})
            self.last: dict[str, Any] = {}
            self.is_paused = False
            self.seeds: set[int | None] = set()

        async def generate(self, prompt, sampling_params, request_id, **_):
            self.seeds.add(sampling_params.seed)
            sampling_params.detokenize = False
            outputs = self.output_processor.request_states[request_id] = asyncio.Queue()
            self.llm.llm_engine.add_request(request_id, prompt, sampling_params)
            is_finished = False
            while not is_finished:
                while outputs.empty():
                    await asyncio.sleep(0)
                    self.step()
                output = outputs.get_nowait()
                is_finished = output.finished
                yield output
            del self.output_processor.request_states[request_id], self.last[request_id]

        def step(self):
            if not self.is_paused:
                for output in self.llm.llm_engine.step():
                    self.last[output.request_id] = output
                    self.output_processor.request_states[output.request_id].put_nowait(output)

        async def pause_generation(self, **_):
            from vllm.outputs import RequestOutput

            self.is_paused = True
            states = self.output_processor.request_states
            self.llm.llm_engine.abort_request(list(states), internal=False)
            for request_id, outputs in states.items():
                last = self.last.get(request_id)
                if last is None:
                    self.last[request_id] = RequestOutput(request_id, None, None, None, [], True)
                    outputs.put_nowait(self.last[request_id])
                elif not last.finished:
                    last.outputs[0].finish_reason, last.finished = "abort", True
                    outputs.put_nowait(last)

        async def resume_generation(self):
            self.is_paused = False

        async def collective_rpc(self, method, args=()):
            return self.llm.collective_rpc(method, args=args)

        @property
        def engine_core(self):
            return self

        async def call_utility_async(self, method):
            return getattr(self.llm.llm_engine.engine_core.engine_core, method)()

    def make(spec, full_determinism=False, **arguments):
        llm = make_engine(spec, scheduler_cls=SCHEDULER, worker_extension_cls=EXTENSION, **arguments)
        return server_of(SteppedAsyncLLM(llm), {"method": "sam", **(spec or {})}, full_determinism)

    # It would kill the test's process when the process's parent ends.
    monkeypatch.setattr(utils, "set_death_signal", lambda: None)
    return make
