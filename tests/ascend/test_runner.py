"""Our drafter and samplers in whole engines of the published vllm-ascend; torch_npu is a stub."""

from importlib import metadata
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

from rollout_spec.config import MAX_ON_NPUS, ConfigError  # noqa: E402
from rollout_spec.doctor import diagnosis  # noqa: E402
from rollout_spec.patches import PatchError, applied  # noqa: E402
from rollout_spec.vllm import ascend, plugin, versions  # noqa: E402
from rollout_spec.vllm.both_runners.cuda_graphs import pads_drafts  # noqa: E402
from rollout_spec.vllm.mrv1 import sampler  # noqa: E402
from rollout_spec.vllm.proposing.proposer import BatchProposer  # noqa: E402
from tests.ascend.conftest import K, engine, noted_lengths, runner_alone, siblings  # noqa: E402
from tests.engine.conftest import configured, runner_of  # noqa: E402
from tests.engine.serving import assert_same, num_accepted, serve  # noqa: E402

KEYED: dict[str, Any] = {"method": "keyed"}


def config_of(model, spec, **others):
    without = {"speculative_config": None} if "method" in spec else {}
    options = {"rollout_spec": {"history": 0, "batch_threshold": 64} | spec}
    return configured(model, spec, **without, additional_config=options | others)


@pytest.fixture(scope="module")
def plain(coarse_model):
    with engine(coarse_model, None, additional_config={"rollout_spec": KEYED}) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(coarse_model):
    with engine(coarse_model, {"history": 0}) as llm:
        yield llm


def assert_drafts_change_nothing(plain, drafting, *kinds, more_than=20):
    num_accepted(drafting)
    expected, found = (serve(llm, siblings(*kinds)) for llm in (plain, drafting))
    assert num_accepted(drafting) > more_than
    assert_same(found, expected)


def test_these_releases_are_a_pair_that_is_known():
    assert current_platform.device_type == "npu"
    assert ascend.PAIRS[metadata.version("vllm-ascend")] == versions.version()
    assert plugin.misfits.failure is None
    assert not ascend.has_custom_class()
    assert "vllm-ascend-custom-class" in {patch.name for patch in applied()}
    sampler.check_samplers()


def test_doctor_finds_the_stack_whole():
    checks = {check.name: check for check in diagnosis.diagnose()}
    assert [check for check in checks.values() if check.status == "fail"] == []
    assert checks["device"].detail == f"npu, vllm-ascend {metadata.version('vllm-ascend')}"
    assert "patch vllm-ascend-custom-class" in checks


def test_the_runner_makes_our_drafter_and_leaves_others_theirs(drafting, coarse_model):
    runner = runner_of(drafting)
    assert type(runner.drafter) is BatchProposer
    assert isinstance(runner.sampler, AscendSampler)
    assert isinstance(runner.rejection_sampler, theirs.AscendRejectionSampler)
    assert not runner.use_async_scheduling
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with engine(coarse_model, None, speculative_config=ngram) as llm:
        assert type(runner_of(llm).drafter) is AscendNgramProposer
        lengths = noted_lengths(llm)
        serve(llm, siblings({"temperature": 0.0}))
        assert sum(lengths) > 0


@pytest.mark.parametrize(
    "kinds",
    [
        [{}],
        [{"temperature": 0.0}],
        [{"top_k": 20, "top_p": 0.8}],
        [{"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.7, "temperature": 0.7}, {"logprobs": 2}],
        [{"min_tokens": 20, "stop_token_ids": list(range(8))}],
    ],
    ids=["sampled", "greedy", "cut", "mixed", "min_tokens"],
)
def test_tokens_are_those_without_drafts(plain, drafting, kinds):
    assert_drafts_change_nothing(plain, drafting, *kinds)


def test_what_relaxes_their_verification_does_not_reach_ours(plain, coarse_model):
    """Drafts that their `enable_entropy_verify` would keep, of flat rows, are as any other."""
    relaxed = {"rejection_sampler_config": {"enable_entropy_verify": True, "posterior_threshold": 0.01}}
    options = {"history": 0, "batch_threshold": 64, "num_speculative_tokens": K}
    with engine(coarse_model, {}, additional_config={"rollout_spec": options, **relaxed}) as llm:
        assert theirs.get_ascend_config().rejection_sampler_config.enable_entropy_verify
        assert_drafts_change_nothing(plain, llm, {"temperature": 2.0}, more_than=0)


def test_a_dummy_run_has_nothing_to_run(drafting):
    """Which every start, and data-parallel ranks without work, take."""
    with torch.inference_mode():
        runner_of(drafting)._dummy_run(8)


@pytest.mark.parametrize("name", ["enable_async_exponential", "enable_reduce_sample"])
def test_what_our_noise_cannot_have_is_one_line(name, coarse_model):
    for spec in ({}, KEYED):
        with pytest.raises(ConfigError, match=rf"^additional_config\.{name}: not with rollout[^\n]*$"):
            config_of(coarse_model, spec, **{name: True})
    config_of(coarse_model, {"method": "off"}, **{name: True})


def test_longer_drafts_than_their_attention_takes_are_one_line(coarse_model):
    message = r"^rollout\.spec\.num_speculative_tokens=16: must be at most 15 [^\n]*$"
    with pytest.raises(ConfigError, match=message):
        config_of(coarse_model, {"num_speculative_tokens": MAX_ON_NPUS + 1})
    config = config_of(coarse_model, {"num_speculative_tokens": MAX_ON_NPUS})
    spec = SimpleNamespace(page_size_bytes=1)
    AscendAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))  # which has the assertion


def test_their_model_runner_v2_is_one_line(coarse_model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # vllm-ascend brings its own
    refusal = r"V2 does not yet support: rollout_spec's drafter \([^\n]*of its own; set [^\n]*=0;"
    with pytest.raises(ConfigError, match=r"^rollout\.spec\.method=keyed: [^\n]*its own\. Set [^\n]*=0$"):
        config_of(coarse_model, KEYED)
    with pytest.raises(ValueError, match=refusal):
        config_of(coarse_model, {})


def test_another_release_is_one_line(coarse_model, monkeypatch):
    monkeypatch.setattr(ascend, "PAIRS", {})
    monkeypatch.setattr(plugin.misfits, "failure", None)
    plugin.register()
    message = r"^vllm-ascend 0\.2\d\.\S+ with vllm 0\.2\d\.0 is not supported[^\n]*$"
    for spec in ({}, KEYED):
        with pytest.raises(ConfigError, match=message):
            config_of(coarse_model, spec)
    configured(coarse_model)


class RunnerThatHandsOnMore:
    def _get_drafter(self): ...
    def propose_draft_token_ids(self, scheduler_output): ...


class RunnerThatAsksForADevice:
    def _get_drafter(self, device): ...
    def propose_draft_token_ids(self, valid_sampled_token_ids): ...


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (RunnerThatHandsOnMore, r"propose_draft_token_ids takes self, scheduler_output"),
        (RunnerThatAsksForADevice, r"_get_drafter takes self, device"),
    ],
)
def test_a_runner_that_has_changed_is_named_and_one_with_the_method_left_alone(runner, message, monkeypatch):
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
def test_which_steps_have_a_graph_by_their_dispatcher(mode, coarse_model):
    """As the docs have it; where a step has none for want of drafts, ours are padded."""
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}
    config = configured(coarse_model, {"num_speculative_tokens": K}, **graphs)
    with runner_alone(config) as runner:
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
    assert pads_drafts(config) == (found[2] == CUDAGraphMode.NONE.name)


def test_drafts_are_padded_where_others_have_no_graph(plain, coarse_model, monkeypatch):
    """The stub has no graphs: what is seen above is said here."""
    monkeypatch.setattr("rollout_spec.vllm.proposing.proposer.pads_drafts", lambda _: True)
    with engine(coarse_model, {"history": 0}) as llm:
        lengths = noted_lengths(llm)
        assert_drafts_change_nothing(plain, llm, {}, {"top_k": 20})
    assert set(lengths[8:]) == {K}  # after the first step with drafts
