"""Our drafter and samplers in the published vllm-ascend, on its own model runner; torch_npu is a stub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from rollout_spec.vllm.ascend import import_worker

import_worker()  # or its modules import each other in circles
from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder  # noqa: E402
from vllm_ascend.sample import rejection_sampler as theirs  # noqa: E402
from vllm_ascend.sample.sampler import AscendSampler  # noqa: E402
from vllm_ascend.spec_decode import AscendNgramProposer  # noqa: E402
from vllm_ascend.worker import model_runner_v1  # noqa: E402

from rollout_spec.certify import diagnosis  # noqa: E402
from rollout_spec.config import MAX_ON_NPUS, ConfigError  # noqa: E402
from rollout_spec.patches import PatchError, applied  # noqa: E402
from rollout_spec.vllm import ascend, plugin, versions  # noqa: E402
from rollout_spec.vllm.cuda_graphs import fills_drafts  # noqa: E402
from rollout_spec.vllm.mrv1 import sampler  # noqa: E402
from rollout_spec.vllm.proposer import SuffixProposer  # noqa: E402
from tests.ascend.engine import (  # noqa: E402
    Engine,
    K,
    alone,
    coarse_logits,
    make_config,
    make_runner,
)

OFF: dict[str, Any] = {"method": "off"}
FALSE_ALARM_RATE = 1e-4  # of a test that is right; its seed is fixed


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with alone():
        yield


def said(
    model: Path, spec: dict[str, Any], requests: list[dict[str, Any]], **arguments: Any
) -> tuple[dict, Engine]:
    """What the requests get, four siblings of each kind, and the engine."""
    engine = Engine(make_runner(make_config(model, spec, **arguments)), coarse_logits())
    for i, params in enumerate(requests * 4):
        engine.add(f"request {i}", [1, 2, 3 + i % len(requests)], **params)
    return engine.run(), engine


def test_these_releases_are_a_pair_that_is_known() -> None:
    assert current_platform.device_type == "npu"
    assert ascend.PAIRS[metadata.version("vllm-ascend")] == versions.version()
    assert plugin.failure is None
    assert not ascend.has_custom_class()
    assert "vllm-ascend-custom-class" in {patch.name for patch in applied()}
    sampler.check_engine_patches()


def test_doctor_finds_the_stack_whole() -> None:
    checks = {check.name: check for check in diagnosis.diagnose()}
    failed = [check for check in checks.values() if check.status == diagnosis.FAIL]
    assert failed == []
    assert checks["device"].detail == f"npu, vllm-ascend {metadata.version('vllm-ascend')}"
    assert "patch vllm-ascend-custom-class" in checks


def test_the_runner_makes_our_drafter_and_leaves_others_theirs(tmp_path: Path) -> None:
    runner = make_runner(make_config(tmp_path, {}))
    assert type(runner.drafter) is SuffixProposer
    assert type(runner.sampler) is AscendSampler
    assert type(runner.rejection_sampler) is theirs.AscendRejectionSampler
    assert not runner.use_async_scheduling
    theirs_drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    runner = make_runner(make_config(tmp_path, None, speculative_config=theirs_drafts))
    assert type(runner.drafter) is AscendNgramProposer
    engine = Engine(runner, coarse_logits())
    engine.add("one", [1, 2, 3], temperature=0.0)
    engine.run()
    assert engine.num_accepted > 0


@pytest.mark.parametrize(
    "requests",
    [
        [{}],
        [{"temperature": 0.0}],
        [{"top_k": 20, "top_p": 0.8}],
        [{"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.7, "temperature": 0.7}, {"logprobs": 2}],
        [{"min_tokens": 20, "stop_token_ids": list(range(8))}],
    ],
    ids=["sampled", "greedy", "cut", "mixed", "min_tokens"],
)
def test_tokens_are_those_without_drafts(requests: list[dict[str, Any]], tmp_path: Path) -> None:
    plain, _ = said(tmp_path, OFF, requests)
    drafted, engine = said(tmp_path, {}, requests)
    assert engine.num_accepted > 20
    assert drafted == plain


def test_what_relaxes_their_verification_does_not_reach_ours(tmp_path: Path) -> None:
    """Drafts that their `enable_entropy_verify` would keep, of flat rows, are as any other."""
    plain, _ = said(tmp_path, OFF, [{"temperature": 2.0}])
    relaxed = {"enable_entropy_verify": True, "posterior_threshold": 0.01}
    drafted, engine = said(
        tmp_path, {}, [{"temperature": 2.0}], additional_config={"rejection_sampler_config": relaxed}
    )
    assert theirs.get_ascend_config().rejection_sampler_config.enable_entropy_verify
    assert sum(engine.lengths) > 20
    assert drafted == plain


def test_their_own_verification_gives_greedy_requests_the_same(tmp_path: Path) -> None:
    plain, _ = said(tmp_path, OFF, [{"temperature": 0.0}])
    drafted, engine = said(tmp_path, {"verify": "standard"}, [{"temperature": 0.0}])
    assert engine.num_accepted > 20
    assert drafted == plain


def test_a_dummy_run_has_nothing_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every start, and data-parallel ranks without work, take."""
    runner = make_runner(make_config(tmp_path, {}))
    runner.model = None
    monkeypatch.setattr(
        model_runner_v1, "set_ascend_forward_context", lambda *_, **__: contextlib.nullcontext()
    )
    monkeypatch.setattr(runner, "_model_forward", lambda *_: torch.zeros(8, 1))
    hidden, _ = runner._dummy_run(8)
    assert hidden.shape == (8, 1)


@pytest.mark.parametrize("name", ["enable_async_exponential", "enable_reduce_sample"])
def test_what_coupled_cannot_have_is_one_line(name: str, tmp_path: Path) -> None:
    for spec in ({}, OFF):
        with pytest.raises(ConfigError, match=rf"^additional_config\.{name}: not with rollout[^\n]*$"):
            make_config(tmp_path, spec, additional_config={name: True})
    make_config(tmp_path, {"verify": "standard"}, additional_config={name: True})


def test_longer_drafts_than_their_attention_takes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.spec\.num_speculative_tokens=16: must be at most 15 [^\n]*$"
    ):
        make_config(tmp_path, {"num_speculative_tokens": MAX_ON_NPUS + 1})
    config = make_config(tmp_path, {"num_speculative_tokens": MAX_ON_NPUS})
    spec = SimpleNamespace(page_size_bytes=1)
    AscendAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))  # which has the assertion


def test_their_model_runner_v2_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # vllm-ascend brings its own
    with pytest.raises(
        ConfigError, match=r"^rollout\.spec\.verify=coupled: [^\n]*of its own\. Set [^\n]*=0$"
    ):
        make_config(tmp_path, OFF)
    with pytest.raises(
        ValueError,
        match=r"V2 does not yet support: rollout_spec's drafter \([^\n]*of its own; set [^\n]*=0;",
    ):
        make_config(tmp_path, {})


def test_another_release_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "PAIRS", {})
    monkeypatch.setattr(plugin, "failure", None)
    plugin.register()
    message = r"^vllm-ascend 0\.2\d\.\S+ with vllm 0\.2\d\.0 is not supported[^\n]*$"
    for spec in ({}, OFF):
        with pytest.raises(ConfigError, match=message):
            make_config(tmp_path, spec)
    make_config(tmp_path, None)


class RunnerThatHandsOnMore:
    def _get_drafter(self) -> None: ...
    def propose_draft_token_ids(self, scheduler_output: Any) -> None: ...


class RunnerThatAsksForADevice:
    def _get_drafter(self, device: Any) -> None: ...
    def propose_draft_token_ids(self, valid_sampled_token_ids: Any) -> None: ...


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (RunnerThatHandsOnMore, r"propose_draft_token_ids takes self, scheduler_output"),
        (RunnerThatAsksForADevice, r"signature of \S+_get_drafter is \(self, device"),
    ],
)
def test_a_runner_that_has_changed_is_named_and_one_with_the_method_left_alone(
    runner: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, before = SimpleNamespace(NPUModelRunner=runner), dict(vars(runner))
    with pytest.raises(PatchError, match=message):
        ascend.give_runner_drafter(module)
    monkeypatch.setattr(ascend, "has_custom_class", lambda: True)
    ascend.give_runner_drafter(module)
    assert dict(vars(runner)) == before


# By the draft tokens of each of eight rows: which graph a step has.
GRAPHS = {
    "FULL_DECODE_ONLY": {0: "NONE", 2: "NONE", K: "FULL"},
    "FULL_AND_PIECEWISE": {0: "PIECEWISE", 2: "PIECEWISE", K: "FULL"},
    "PIECEWISE": {0: "PIECEWISE", 2: "PIECEWISE", K: "PIECEWISE"},
}


@pytest.mark.parametrize("mode", GRAPHS)
def test_which_steps_have_a_graph_by_their_dispatcher(mode: str, tmp_path: Path) -> None:
    """As the docs have it; where a step has none for want of drafts, ours are filled up."""
    config = make_config(tmp_path, {}, enforce_eager=False, compilation_config={"cudagraph_mode": mode})
    runner = make_runner(config)
    resolved = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        min_cg_support=AttentionCGSupport.ALWAYS, min_cg_attn_backend=None,
        uniform_decode_query_len=runner.uniform_decode_query_len, max_num_reqs=runner.max_num_reqs,
    )  # fmt: skip
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(resolved, runner.uniform_decode_query_len)
    runner.input_batch.num_computed_tokens_cpu[:] = 9
    found = {}
    for num_drafted in GRAPHS[mode]:
        length = 1 + num_drafted
        found[num_drafted] = runner._determine_batch_execution_and_padding(
            num_tokens=8 * length, num_reqs=8, num_scheduled_tokens_np=np.full(8, length),
            max_num_scheduled_tokens=length, use_cascade_attn=False,
        )[0].name  # fmt: skip
    assert found == GRAPHS[mode]
    assert fills_drafts(config) == (found[2] == CUDAGraphMode.NONE.name)


def test_drafts_are_filled_up_where_others_have_no_graph(tmp_path: Path) -> None:
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    plain, _ = said(tmp_path, OFF, [{}, {"top_k": 20}])
    drafted, engine = said(tmp_path, {}, [{}, {"top_k": 20}], **graphs)
    assert drafted == plain
    assert set(engine.lengths[8:]) == {K}  # behind the prefills
