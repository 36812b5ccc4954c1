"""For programs, before all else: vLLM's engine on the CPU goes the ways of CUDA, on MRV2.

At its start it does what vLLM's worker for GPUs does: dummy runs that profile, requests that warm up, and the
capture of graphs (`recorded_graphs`). Its steps replay them, and what goes to the host arrives late.
"""

# ruff: noqa: I001 (what is imported depends on what comes before)
import tests.engine.interpreted_triton  # noqa: F401

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from rollout_spec.patches import when_imported
from tests.accelerator import place
from tests.engine import recorded_graphs

replays: Counter[str] = Counter()  # by the graph's manager, and whether it is for plain steps or for drafts
faults: Counter[str] = Counter()  # what a GPU would compute wrongly
rows = Counter[str]()  # of logits: the most in the profile, and the most later


def with_graphs(mode):
    compilation = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    return {"enforce_eager": False, "compilation_config": compilation}


def take_notes():
    counted = {"replays": replays, "faults": faults, "waits": recorded_graphs.waits, "rows": rows}
    notes = {name: dict(counter) for name, counter in counted.items()}
    for counter in counted.values():
        counter.clear()
    return notes


def allow_graphs(cpu):
    """Of the platform: its check of a configuration would turn graphs off."""
    platform = cpu.CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_keep(cls, vllm_config):
        compilation = vllm_config.compilation_config
        names = "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"
        kept = {name: getattr(compilation, name) for name in names}
        check(cls, vllm_config)
        vars(compilation).update(kept)

    platform.check_and_update_config = classmethod(check_and_keep)
    platform.support_static_graph_mode = classmethod(lambda cls: True)
    platform.graph_pool_handle = classmethod(lambda cls: (0, 0))
    # As one operation, what is inside attention would not be noted.
    platform.opaque_attention_op = classmethod(lambda cls: False)


def capture_in_groups(parallel_state):
    """A group of ranks asks for CUDA's communicator there; collectives are noted like other operations."""
    ready = parallel_state.GraphCaptureContext(None)
    parallel_state.GroupCoordinator.graph_capture = lambda *_, **__: contextlib.nullcontext(ready)


def seem_compiled(module):
    if hasattr(module, "has_compiled_submodule"):
        module.has_compiled_submodule = lambda model: True


def count_replays(cudagraph_utils):
    seem_compiled(cudagraph_utils)
    manager = cudagraph_utils.CudaGraphManager
    run = manager.run_fullgraph

    def run_and_count(self, desc):
        has_drafts = getattr(desc, "max_query_len", None) is not None or desc.uniform_token_count == -1
        kind = "drafts" if has_drafts else "plain"
        replays[f"{type(self).__name__.removeprefix('DraftGraphs')} {kind}"] += 1
        return run(self, desc)

    manager.run_fullgraph = run_and_count


def count_rows(module):
    """Of logits, which vLLM computes in these two functions of a runner."""
    seem_compiled(module)
    runner = module.GPUModelRunner
    sample, dummy_sampler_run = runner.sample, runner._dummy_sampler_run

    def note(num):
        rows[phase] = max(rows[phase], num)

    @functools.wraps(sample)
    def sample_and_note(self, hidden_states, input_batch, grammar_output):
        note(len(input_batch.logits_indices))
        return sample(self, hidden_states, input_batch, grammar_output)

    @functools.wraps(dummy_sampler_run)
    def run_and_note(self, hidden_states):
        note(len(hidden_states))
        return dummy_sampler_run(self, hidden_states)

    runner.sample, runner._dummy_sampler_run = sample_and_note, run_and_note


phase = "later"


class Plan:
    """What attention has planned for a step, which a graph reads in each replay.

    FlashAttention 3 writes such a plan (`scheduler_metadata`) to a buffer in each step. Its layout goes by
    the number of rows, and by whether they have several tokens.
    """

    def __init__(self, builder, metadata, batch):
        self.builder, self.metadata = builder, metadata
        self.layout = batch.num_reqs, batch.max_query_len > 1
        self.max_query_len, self.starts = batch.max_query_len, batch.query_start_loc
        self.num_tokens = batch.num_actual_tokens

    def latest(self):
        """That of the step that runs, where the graph was captured with this one."""
        plan, starts = self.builder.plan, self.starts
        longest, num_tokens = int((starts[1:] - starts[:-1]).max()), int(starts[-1])
        if plan.layout != self.layout:
            faults[f"attention: a plan for {plan.layout} in a graph for {self.layout}"] += 1
        if longest > self.max_query_len:
            faults[f"attention: a row of {longest} tokens in a graph for {self.max_query_len}"] += 1
        if num_tokens > self.num_tokens:
            faults[f"attention: {num_tokens} tokens in a graph for {self.num_tokens}"] += 1
        return plan.metadata


def plan_attention(cpu_attn):
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = cpu_attn.CPUAttentionMetadataBuilder
    build = builder.build

    def build_and_plan(self, common_prefix_len, common_attn_metadata, *others):
        metadata = build(self, common_prefix_len, common_attn_metadata, *others)
        self.plan = Plan(self, metadata.scheduler_metadata, common_attn_metadata)
        metadata.scheduler_metadata.latest = self.plan.latest
        return metadata

    builder.build = build_and_plan
    builder._cudagraph_support = AttentionCGSupport.ALWAYS  # as FlashAttention 3 and Triton


def start_as_on_gpus(cpu_worker):
    worker = cpu_worker.CPUWorker
    determine, warm_up = worker.determine_available_memory, worker.compile_or_warm_up_model

    def profile_and_determine(self):
        from vllm.config import CUDAGraphMode, set_current_vllm_config
        from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

        reset_workspace_manager()  # that of the engine before
        init_workspace_manager(self.device)
        global phase
        phase = "profile"
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        phase = "later"
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self.model_runner.profile_cudagraph_memory()
        return determine(self)

    def warm_up_and_capture(self):
        found = warm_up(self)  # with requests: `interpreted_triton`
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        return found

    worker.determine_available_memory = profile_and_determine
    worker.compile_or_warm_up_model = warm_up_and_capture


class Event:
    """In place of `torch.cuda.Event`: it makes the copies to the host that were begun before.

    As late as they may come: when they are waited for, or have been asked for four times. Or at once.
    """

    begun: ClassVar[deque[Callable[[], None]]] = deque()
    num_made: ClassVar[int] = 0
    are_early: ClassVar[bool] = False

    def __init__(self, *_, **__):
        self._num = self._num_asked = 0

    def record(self, *_):
        self._num, self._num_asked = Event.num_made + len(Event.begun), 0
        if Event.are_early:
            self.synchronize()

    def synchronize(self):
        while Event.num_made < self._num:
            Event.begun.popleft()()
            Event.num_made += 1

    def wait(self, *_):
        """A stream waits, and not the host."""

    def query(self):
        self._num_asked += 1
        if Event.num_made < self._num and self._num_asked < 4:
            return False
        self.synchronize()
        return True

    def elapsed_time(self, *_):
        return 0.0


def copy_late(x):
    """In place of vLLM's `async_copy_to_np`."""
    copied, at_first = np.full(tuple(x.shape), 77, x.numpy().dtype), x.numpy().copy()
    where = place()

    def copy():
        copied[...] = x.numpy()
        if not np.array_equal(copied, at_first, equal_nan=True):
            faults[f"{x.dtype} {[*x.shape]} of {where} was overwritten before it had been copied"] += 1

    Event.begun.append(copy)
    return copied


def arrive_late(module):
    torch.cuda.Event = Event  # type: ignore[misc]
    if hasattr(module, "async_copy_to_np"):
        module.async_copy_to_np = copy_late


recorded_graphs.install()
when_imported("vllm.platforms.cpu", allow_graphs)
# Piecewise graphs without torch.compile: such a step has the padded batch, and no graph.
no_compilation = "requires_piecewise_compilation", lambda self: False
when_imported("vllm.config.compilation", lambda it: setattr(it.CUDAGraphMode, *no_compilation))
when_imported("vllm.distributed.parallel_state", capture_in_groups)
when_imported("vllm.v1.worker.gpu.cudagraph_utils", count_replays)
when_imported("vllm.v1.worker.gpu.model_runner", count_rows)
when_imported("vllm.v1.attention.backends.cpu_attn", plan_attention)
when_imported("vllm.v1.worker.cpu_worker", start_as_on_gpus)
when_imported("vllm.v1.worker.cpu.shm", arrive_late)  # which has events of its own
when_imported("vllm.v1.worker.gpu.async_utils", arrive_late)
when_imported("rollout_spec.vllm.mrv2.arrivals", arrive_late)
