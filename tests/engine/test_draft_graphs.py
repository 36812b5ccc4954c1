"""Which CUDA graph MRV2 takes for a step with drafts, asked of vLLM's own dispatcher with CUDA's settings."""

import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import NonCallableMock

import numpy as np
import pytest
import torch

from rollout_spec.patches import put_before
from rollout_spec.vllm.refusals.checks import mrv2_misfit
from rollout_spec.vllm.versions import version
from tests.engine.graph_steps import GRAPHS, STEPS, K

if version() == "0.23.0" and mrv2_misfit() is not None:
    pytest.skip("with vLLM 0.23 our drafter runs on MRV1 alone", allow_module_level=True)

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils, dp_utils, model_runner
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.vllm.mrv2 import graphs, graphs_24
from rollout_spec.vllm.mrv2.host_drafts import SPECULATOR
from rollout_spec.vllm.mrv2.runner import DraftingRunner, patch_graphs_for_drafts
from rollout_spec.vllm.mrv2.signatures import HAS_QUERY_LENS

SIZES = [1, 2, 4, 8, 16, 24, 32]
ROWS = 16
# Of STEPS: plain ones, of mixed lengths, of K draft tokens in every row.
MIXED = GRAPHS | dict.fromkeys(("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"), ["FULL"] * 3)


@dataclasses.dataclass
class SomeBatch:
    num_scheduled_tokens: Any = dataclasses.field(default_factory=lambda: np.zeros(1))


class SomeState(ModelState):
    def __init__(self, additional_support):
        self.get_additional_cg_support = lambda: additional_support

    def prepare_attn(self, input_batch):
        """For how many tokens of a row vLLM plans attention; 0: for the longest."""
        return getattr(input_batch, "max_query_len", None) or int(input_batch.num_scheduled_tokens.max())


SomeState.__abstractmethods__ = frozenset()


class SomeRunner(model_runner.GPUModelRunner):
    """vLLM's, of which only what chooses graphs is made."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def initialize_kv_cache(self, mode):
        given = self.vllm_config, torch.device("cpu"), mode, self.decode_query_len
        self.cudagraph_manager = cudagraph_utils.CudaGraphManager(*given)
        self.cudagraph_manager._graphs_captured = True

    def update_requests(self, scheduler_output): ...

    @functools.wraps(model_runner.GPUModelRunner.prepare_inputs)
    def prepare_inputs(self, *_):
        return SomeBatch()


# Of vLLM's configuration, where a test wants nothing else.
PARALLEL = {
    "data_parallel_size": 1, "tensor_parallel_size": 1, "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1, "use_ubatching": False,
}  # fmt: skip


def runner_with(
    monkeypatch, mode="FULL_AND_PIECEWISE", support="ALWAYS", more="ALWAYS", sizes=SIZES, max_num_seqs=ROWS,
    speculator=None, architecture=None, kind=SomeRunner, **parallel,
):  # fmt: skip
    """What our engine's runner has once its KV cache is made: a manager of vLLM's, and what was said."""
    only_rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: only_rank)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, False)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(**PARALLEL | parallel),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1],
            cudagraph_mode=CUDAGraphMode[mode], adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
        ),
        model_config=SimpleNamespace(is_hybrid=architecture is not None, architecture=architecture),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        num_speculative_tokens=K,
    )  # fmt: skip
    builder = SimpleNamespace(get_cudagraph_support=lambda *_: AttentionCGSupport[support])
    group = SimpleNamespace(
        layer_names=["layer"], kv_cache_spec=None, backend=type("SomeBackend", (), {}),
        get_metadata_builder=lambda _: builder,
    )  # fmt: skip
    said: list[str] = []
    monkeypatch.setattr(graphs, "logger", SimpleNamespace(info_once=said.append, warning_once=said.append))
    other = AttentionCGSupport[more], "SomeOther"
    runner: Any = kind(
        vllm_config=config, attn_groups=[[group]], speculator=speculator, said=said,
        model_state=SomeState(other), cudagraph_manager=None, host_drafts=None,
        block_tables=BlockTables.__new__(BlockTables),
        adaptive_verification=None, pcp_manager=None, use_pp=False,
    )  # fmt: skip
    put_before(DraftingRunner, runner, SPECULATOR)
    runner.graphs_misfit = patch_graphs_for_drafts(runner)
    runner.decode_query_len = 1 + K  # vLLM sets it when it loads the model
    runner.initialize_kv_cache(CUDAGraphMode[mode])
    return runner


def graph_of(runner, rows, num_prompts=0, rank=0):
    """The graph of a step whose rows have so many tokens, the last of them chunks of prompts."""
    is_prompt = np.arange(len(rows)) >= len(rows) - num_prompts
    names = [str(row) for row in range(len(rows))]
    runner.req_states = SimpleNamespace(
        req_id_to_index={name: row for row, name in enumerate(names)},
        prefill_len=SimpleNamespace(np=np.full(len(rows), 99)),
        num_computed_prefill_tokens=np.where(is_prompt, 0, 99),
    )
    nums = dict(zip(names, rows, strict=True))
    drafts = {name: [7] * (num - 1) for name, num in nums.items() if num > 1 and not is_prompt[int(name)]}
    output = SimpleNamespace(num_scheduled_tokens=nums, total_num_scheduled_tokens=sum(rows))
    output.scheduled_spec_decode_tokens = drafts
    num_ranks = runner.vllm_config.parallel_config.data_parallel_size
    if HAS_QUERY_LENS:
        uniform, more = runner.gather_batch_req_state(output, False)[1], {"max_query_len": max(rows)}
    else:
        runner.update_requests(output)
        uniform, more = cudagraph_utils.get_uniform_token_count(len(rows), sum(rows), max(rows)), {}
    asked = len(rows), sum(rows), uniform, num_ranks, rank
    return model_runner.dispatch_cg_and_sync_dp(runner.cudagraph_manager, *asked, **more)[0]


def is_for_drafts(graph):
    longest = getattr(graph, "max_query_len", None)
    return longest == 1 + K or graph.uniform_token_count == graphs_24.VARYING


def planned(runner, graph):
    """For how many tokens of a row attention is planned in a step that replays this graph."""
    given = [None] * (1 + HAS_QUERY_LENS)
    return runner.model_state.prepare_attn(runner.prepare_inputs(*given, graph))


def table(runner):
    return [" ".join({graph_of(runner, rows).cg_mode.name for rows in steps}) for steps in STEPS]


def test_steps_with_drafts_have_full_graphs_where_vllm_has_some(monkeypatch):
    assert {mode: table(runner_with(monkeypatch, mode)) for mode in GRAPHS} == MIXED


def test_plain_steps_keep_the_graphs_of_one_token_a_row(monkeypatch):
    """They are as large as those of an engine without a drafter, and captured for one token a row."""
    runner = runner_with(monkeypatch)
    assert runner.decode_query_len == 1 + K, "for whatever else it is used"
    for num_rows in range(1, ROWS + 1):
        graph = graph_of(runner, [1] * num_rows)
        assert (graph.uniform_token_count, graph.num_reqs) == (1, graph.num_tokens)
        assert graph.num_tokens == min(size for size in SIZES if size >= num_rows)


def test_a_graph_has_room_for_the_rows_and_the_longest_draft(monkeypatch):
    runner = runner_with(monkeypatch)
    for rows in ([1 + K, 1, 4], [2, 2], [1] * (ROWS - 1) + [2], [1 + K] * 3):
        graph = graph_of(runner, rows)
        assert is_for_drafts(graph) and graph.num_reqs == min(graph.num_tokens, ROWS) >= len(rows)
        assert graph.num_tokens == min(size for size in (2, 4, 8, 16, 32) if size >= sum(rows))
    assert [graph_of(runner, [2] * 15 + [num]).cg_mode.name for num in (2, 3)] == ["FULL", "NONE"]


@pytest.mark.parametrize(
    ("mode", "other"), [("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", "NONE")]
)
def test_a_step_with_a_prompt_replays_no_graph_of_decodes(mode, other, monkeypatch):
    runner = runner_with(monkeypatch, mode)
    for rows, num_prompts in (([1, 4, 3], 1), ([3, 3], 2), ([1, 1 + K], 1)):
        assert graph_of(runner, rows, num_prompts).cg_mode.name == other
        assert graph_of(runner, rows).cg_mode.name == "FULL"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"support": "UNIFORM_BATCH"}, "SomeBackend does not allow"),
        ({"support": "NEVER"}, "SomeBackend does not allow"),
        ({"more": "UNIFORM_BATCH"}, "SomeOther does not allow"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"speculator": NonCallableMock(spec=DraftModelSpeculator)}, "the model that drafts"),
    ],
)
def test_where_they_cannot_be_it_is_said(changed, reason, monkeypatch):
    for mode, num_said in (("FULL_AND_PIECEWISE", 1), ("FULL_DECODE_ONLY", 2), ("PIECEWISE", 0)):
        runner = runner_with(monkeypatch, mode, **changed)
        assert table(runner) == GRAPHS[mode]
        assert len(runner.said) == num_said and all(reason in line for line in runner.said[:1])
        assert all("steps with drafts run without" in line for line in runner.said[1:])


@pytest.mark.skipif(not HAS_QUERY_LENS, reason="we refuse it on MRV2 of vLLM 0.24")
def test_a_policy_with_mamba_2_keeps_its_graphs_of_longest_drafts(monkeypatch):
    runner = runner_with(monkeypatch, architecture="NemotronHForCausalLM")
    assert table(runner) == ["PIECEWISE", "PIECEWISE", "FULL"]
    assert runner.said == []


def test_a_vllm_that_has_changed_has_none_and_is_named(monkeypatch):
    class Changed(SomeRunner):
        def prepare_inputs(self, batch): ...

    runner = runner_with(monkeypatch, kind=Changed)
    assert table(runner) == GRAPHS["FULL_AND_PIECEWISE"]
    assert "Changed.prepare_inputs takes self, batch" in runner.said[0]


def test_attention_is_planned_as_it_was_for_the_graph(monkeypatch):
    runner = runner_with(monkeypatch)
    steps = ([1, 3], 0), ([1, 1], 0), ([1, 3], 1)
    assert [planned(runner, graph_of(runner, *step)) for step in steps] == [1 + K, 0, 0]


def test_how_many_graphs_come_and_in_which_order(monkeypatch):
    """With the sizes of an engine of 256 rows. The largest come first, since later ones use their memory."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    runner = runner_with(monkeypatch, sizes=sizes, max_num_seqs=256)
    captured = runner.cudagraph_manager._capture_descs
    full, pieces = captured[CUDAGraphMode.FULL], captured[CUDAGraphMode.PIECEWISE]
    assert runner.said == ["rollout_spec: 16 full CUDA graphs more, for steps with drafts"]
    assert (len(full), len({*full}), len(pieces)) == (35 + 16, 35 + 16, 51)
    assert [each.num_tokens for each in full] == sorted((each.num_tokens for each in full), reverse=True)


@pytest.mark.parametrize(
    ("rows", "num_prompts", "mode"),
    [
        # The other rank's step is a plain one, which 0.24 tells no other of.
        (([1 + K, 1, 4], [1, 1]), 0, "FULL" if HAS_QUERY_LENS else "PIECEWISE"),
        (([1 + K, 1, 4], [1, 2]), 0, "FULL"),
        (([1, 1], [1, 1]), 0, "FULL"),
        (([1, 3], [1, 4, 2]), 1, "PIECEWISE"),  # of the first rank, the last row
        (([1 + K] * 4, [1, 2]), 0, "NONE"),  # the first rank's is larger than all graphs
    ],
)
def test_data_parallel_ranks_take_the_same_graph(rows, num_prompts, mode, monkeypatch):
    meeting, given = threading.Barrier(2, timeout=60), {}

    def all_reduce(tensor, group=None):
        given[threading.get_ident()] = tensor.clone()
        meeting.wait()
        tensor.copy_(sum(given.values()))

    group = SimpleNamespace(cpu_group=None, cpu_all_reduce_=all_reduce)  # which 0.33 calls
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    monkeypatch.setattr(dp_utils, "dist", SimpleNamespace(all_reduce=all_reduce), raising=False)
    runners = [runner_with(monkeypatch, data_parallel_size=2) for _ in rows]
    with ThreadPoolExecutor(len(rows)) as ranks:
        found = [*ranks.map(graph_of, runners, rows, (num_prompts, 0), range(len(rows)))]
    assert [graph.cg_mode.name for graph in found] == [mode] * 2
    if mode != "NONE":
        assert len({(graph.num_tokens, is_for_drafts(graph)) for graph in found}) == 1
    assert len({planned(runner, graph) for runner, graph in zip(runners, found, strict=True)}) == 1


@pytest.mark.skipif(HAS_QUERY_LENS, reason="vLLM 0.29 and later know such graphs themselves")
def test_a_dummy_run_after_a_step_with_drafts_is_a_plain_step(monkeypatch):
    runner = runner_with(monkeypatch)
    graph_of(runner, [3, 2])
    graph = model_runner.dispatch_cg_and_sync_dp(runner.cudagraph_manager, 2, 2, 1, 1, 0)[0]
    assert graph.uniform_token_count == 1


@pytest.mark.skipif(not HAS_QUERY_LENS, reason="vLLM 0.24 puts shorter rows first by itself")
def test_rows_of_one_token_come_before_a_prompts_chunk_of_any_length_in_a_plain_step(monkeypatch):
    """Attention that decodes rows of one length takes those after the first others for prompts."""
    runner = runner_with(monkeypatch)
    runner.cudagraph_manager = None  # as in vLLM's profile
    runner.req_states = SimpleNamespace(
        req_id_to_index={"chunk": 0, "row": 1}, num_computed_prefill_tokens=np.array([20, 5]),
        prefill_len=SimpleNamespace(np=np.array([100, 5])),
    )  # fmt: skip
    output = SimpleNamespace(
        num_scheduled_tokens={"chunk": 1 + K, "row": 1}, total_num_scheduled_tokens=2 + K,
        scheduled_spec_decode_tokens={},
    )  # fmt: skip
    state, _ = runner.gather_batch_req_state(output, False)
    assert state.req_ids == ["row", "chunk"]
    assert runner.decode_query_len == 1 + K
