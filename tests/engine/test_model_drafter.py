"""A model drafts on both model runners: vLLM's own drafters on the CPU, on MRV2 with interpreted Triton."""

import functools
import json
import shutil
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from rollout_spec.config import ConfigError
from rollout_spec.patches import PatchError
from rollout_spec.vllm import plugin
from rollout_spec.vllm.refusals import checks
from rollout_spec.vllm.refusals.checks import check_options
from rollout_spec.vllm.versions import is_before, mrv2_has_draft_models, version
from tests.engine.conftest import UNTESTED, configured
from tests.engine.interpreted_heads import served_heads
from tests.engine.interpreted_model import served, served_in_brief
from tests.engine.interpreting import NEEDS_MRV2, WITH_GRAPHS, assert_stopped, interpreted, on_cuda
from tests.engine.serving import assert_each_same
from tests.engine.tiny_heads import DRAFT_TOKENS, make_bigrams, make_eagle, make_eagle3, make_even, make_mtp

pytestmark = NEEDS_MRV2
NUM_MODEL_TOKENS = 3


@pytest.fixture(scope="module")
def heads(chat_model, tmp_path_factory):
    models = tmp_path_factory.mktemp("heads")
    for name in ("target", "copy", "bigrams"):
        shutil.copytree(chat_model, models / name)
    make_bigrams(models / "bigrams")
    make_eagle(models / "target", models / "eagle", reads="state")
    make_eagle(models / "bigrams", models / "bigrams-eagle", reads="token")
    make_mtp(models / "mtp", chat_model)
    make_eagle3(models / "target", models / "eagle3")
    for name in ("target", "eagle3"):
        even = models / f"even-{name}".removesuffix("-target")
        shutil.copytree(models / name, even)
        make_even(even)
    return models


V2 = pytest.param("V2", marks=pytest.mark.long)  # "V2 in brief" is what `make test` has of it


@pytest.fixture(scope="module")
def engines_on(heads):
    served_on = {"V1": served, "V2": served, "V2 in brief": served_in_brief}
    return functools.cache(lambda runner: on_runner(runner[:2], served_on[runner], heads))


@pytest.fixture(params=["V1", V2])
def results(request, engines_on):
    return engines_on(request.param)


@pytest.fixture(params=["V1", "V2 in brief", V2])
def preempting(request, engines_on):
    return engines_on(request.param)


@pytest.fixture(scope="module", params=["V1", V2])
def results_of_heads(request, heads):
    return on_runner(request.param, served_heads, heads)


def on_runner(runner, serve, heads):
    if runner == "V1":
        found = json.loads(json.dumps(serve(heads)))
    else:
        brief = ["in brief"] * (serve is served_in_brief)
        found = interpreted(serve.__module__, heads / "results.json", str(heads), *brief)
    where = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}[runner]
    assert {engine["model_runner"] for engine in found.values()} == {where}
    return found


@pytest.mark.parametrize("engine", ["model", "both", "wrong"])
def test_a_models_drafts_change_nothing(results, engine):
    assert_each_same(results[engine]["requests"], results["plain"]["requests"])


def test_a_model_alone_saves_steps_and_both_sources_draft(results):
    num_tokens = sum(len(one["tokens"]) for one in results["model"]["requests"].values())
    assert sum(step["rows"] for step in results["model"]["steps"]) < num_tokens
    assert_both_draft(results["both"])


def assert_both_draft(found):
    counters = found["counters"]
    drafted, accepted = counters["num_draft_tokens"], counters["num_accepted_tokens"]
    of_model = counters["num_model_accepted_tokens"], counters["num_model_draft_tokens"]
    assert 0 < of_model[0] < of_model[1] < drafted, "the model's are among all"
    assert of_model[0] < accepted < drafted
    assert counters["num_failed_steps"] == counters["num_untracked_rows"] == 0
    num_passes = counters["num_model_passes"] + counters["num_model_passes_left_out"]
    assert num_passes == NUM_MODEL_TOKENS * len(found["steps"])


def test_rows_are_preempted_and_passes_left_out_where_the_gate_is_closed(preempting):
    found = preempting["preempted"]
    assert_each_same(found["requests"], preempting["plain"]["requests"])
    assert_both_draft(found)
    assert any(step["preempted"] for step in found["steps"])
    num_closed = found["counters"]["num_model_passes_left_out"] / (NUM_MODEL_TOKENS - 1)
    assert 4 < num_closed < len(found["steps"]) - 4


def test_the_target_as_its_own_drafter_is_always_right(results):
    """They share noise, at temperatures of 0, 0.7 and 1; nothing is lost by passes that were left out."""
    counters = results["same"]["counters"]
    assert counters["num_model_passes_left_out"] > 8 * (NUM_MODEL_TOKENS - 1)
    assert counters["num_model_accepted_tokens"] == counters["num_model_draft_tokens"] > 10


def test_passes_are_left_out_where_they_do_not_pay(results):
    """A wrong head's, in time made of passes: it keeps its first one, and a try now and then."""
    num_late = len(results["wrong"]["steps"]) // 3  # after the learning
    num_passes = sum(results["wrong"]["passes"][-num_late:])
    assert num_late <= num_passes < 1.5 * num_late  # all would be 2 a step or more


@pytest.mark.parametrize("engine", ["model", "both"])
def test_a_row_ends_where_it_must(results, engine):
    """With drafts it comes to its most tokens, a stop string, and a weight sync that interrupts it."""
    found, sampled = results[engine], results["plain"]["requests"]["sampled"]
    assert found["interrupted"] == sampled["tokens"]
    assert_stopped(found, sampled)
    if engine == "both":
        assert found["counters_behind"]["num_failed_steps"] == 0


@pytest.mark.parametrize(("engine", "plain"), [("mtp", "plain mtp"), ("eagle3", "plain")])
def test_other_heads_change_nothing(results_of_heads, engine, plain):
    results = results_of_heads
    for found in results[engine].get("heads", {"": results[engine]}).values():
        assert_each_same(found["requests"], results[plain]["requests"])
        assert found["counters"]["num_model_draft_tokens"] > 10
        assert found["counters"]["num_failed_steps"] == 0


def test_a_weight_sync_reaches_the_policys_own_head_and_no_other(results_of_heads):
    """The right head is the target, so it is accepted whole, at temperatures of 0, 0.7 and 1."""
    heads = results_of_heads["mtp"]["heads"]
    if "right" not in heads:
        pytest.skip("the weights come through verl, which is beside vLLM 0.24.0 and not beside this one")
    drafted = {name: found["counters"]["num_model_draft_tokens"] for name, found in heads.items()}
    accepted = {name: found["counters"]["num_model_accepted_tokens"] for name, found in heads.items()}
    assert accepted["wrong"] < 0.9 * drafted["wrong"]
    for name in ("right", "kept"):
        assert accepted[name] == drafted[name] > 20, name


def test_a_head_with_a_vocabulary_of_its_own_draws_with_the_noise_of_its_tokens(results_of_heads):
    """All tokens are equally likely: the head draws the target's wherever it has it."""
    even, num_steps = results_of_heads["even"], 1
    tokens = even["requests"]["one"]["tokens"]
    assert 10 < sum(token in DRAFT_TOKENS for token in tokens) < 30
    place = 1
    while place < len(tokens):
        are_right = [token in DRAFT_TOKENS for token in tokens[place:][:NUM_MODEL_TOKENS]]
        place, num_steps = place + [*are_right, False].index(False) + 1, num_steps + 1
    assert len(even["steps"]) == num_steps


@pytest.fixture(scope="module")
def on_graphs(heads):
    with on_cuda(heads) as scenario:
        yield scenario


@WITH_GRAPHS
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["eagle", "eagle gate"])
def test_graphs_change_nothing_beside_a_model(on_graphs, engine):
    assert_graphs_change_no_drafts(*map(on_graphs, (engine, "eager eagle", "plain")))


@WITH_GRAPHS
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "eager"), [("eagle preempted", "eager eagle"), ("copy", "eager copy")])
def test_neither_where_rows_are_preempted_or_the_model_is_the_target(on_graphs, engine, eager):
    if engine == "copy" and not mrv2_has_draft_models():
        pytest.skip("0.32 is the first vLLM whose MRV2 has draft models")
    assert_graphs_change_no_drafts(*map(on_graphs, (engine, eager, "plain")), has_graphs=engine != "copy")
    assert any(step["preempted"] for step in on_graphs(engine)["steps"]) == (engine == "eagle preempted")


def assert_graphs_change_no_drafts(found, eager, plain, has_graphs=True):
    """Verification would hide what a model drafts wrongly. vLLM captures no graphs of a draft model.

    0.24's manager of a head's graphs has another name.
    """
    assert_each_same(found["requests"], plain["requests"])
    assert found["faults"] == found["waits"] == {}
    assert found["counters"]["num_failed_steps"] == 0 < found["counters"]["num_model_accepted_tokens"]
    counts_head = has_graphs and not is_before(29)
    for manager in ("ModelCudaGraphManager", "SpeculatorCudaGraphManager")[: 1 + counts_head]:
        assert found["replays"][f"{manager} plain"] > 2
    both = found["drafts"].keys() & eager["drafts"].keys()
    assert len(both) > 10, "steps end at the same places, as far as drafts are the same"
    for place in both:
        (tokens, log_odds), (expected, expected_odds) = found["drafts"][place], eager["drafts"][place]
        num = min(len(tokens), len(expected))
        assert tokens[:num] == expected[:num], place
        np.testing.assert_allclose(log_odds[:num], expected_odds[:num], rtol=1e-3, atol=1e-3, err_msg=place)


def test_requests_are_guarded_where_a_model_drafts_alone(heads, monkeypatch):
    plugin.register()
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    config = with_eagle(heads, {"method": "keyed"}, skip_tokenizer_init=False)
    config.structured_outputs_config.reasoning_parser = "deepseek_r1"
    config.scheduler_config.async_scheduling = True
    processor = InputProcessor(config)

    def process(resumable=False, **asked):
        prompt = {"type": "token", "prompt_token_ids": [65]}
        params = SamplingParams(**asked)
        return processor.process_inputs("1", prompt, params, ("generate",), resumable=resumable)

    assert process().prompt_token_ids == [65]
    for name, value in (("resumable", True), ("logprob_token_ids", [65])):
        with pytest.raises(ValueError, match=rf"^rollout_spec: [^\n]*{name}"):
            process(**{name: value})
    grammar = {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")}
    if version() in ("0.23.0", "0.24.0"):  # later ones look for the end of reasoning inside a draft
        with pytest.raises(ValueError, match=r"^rollout_spec: [^\n]*a grammar after reasoning[^\n]*$"):
            process(**grammar)
    config.scheduler_config.async_scheduling = False
    assert process(**grammar).sampling_params.structured_outputs
    config.additional_config["rollout_spec"]["method"] = "off"  # plain vLLM
    assert process(logprob_token_ids=[65]).prompt_token_ids == [65]


def with_eagle(heads, spec, **arguments):
    eagle = {"method": "eagle", "model": str(heads / "eagle"), "num_speculative_tokens": 3}
    options = {"additional_config": {"rollout_spec": UNTESTED | spec}, "speculative_config": eagle}
    return configured(str(heads / "target"), **options | arguments)


@pytest.fixture(params=["V1", "V2"])
def with_runner(request, monkeypatch):
    """Where vLLM has Triton, it takes MRV2 for the target."""
    plugin.register()
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", request.param == "V2")
    return request.param


def test_what_vllm_takes_and_a_model_here_does_not_is_refused(heads, with_runner, monkeypatch):
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    config = with_eagle(heads, {})
    assert config.use_v2_model_runner == (with_runner == "V2")
    speculative = config.speculative_config
    of_runner: dict[str, tuple[tuple[Any, str, Any, str], ...]] = {
        "V1": ((speculative, "disable_padded_drafter_batch", True, "disable_padded_drafter_batch"),),
        "V2": ((checks, "mrv2_misfit", lambda: "it is new", r"rollout_spec: it is new\. Set VLLM_USE_V2_M"),),
    }
    for owner, name, value, refusal in (
        (config.parallel_config, "pipeline_parallel_size", 2, "pipeline_parallel_size must be 1"),
        (speculative, "enable_adaptive_verification", True, "enable_adaptive_verification"),
        (speculative, "use_heterogeneous_vocab", True, "use_heterogeneous_vocab"),
        (speculative, "use_local_argmax_reduction", True, "use_local_argmax_reduction"),
        (speculative, "rejection_sample_method", "synthetic", "rejection_sample_method must be standard"),
        (config, "watermark_config", object(), "watermark_config: a watermark follows from"),
        (speculative.draft_model_config, "max_model_len", 9, "the drafter takes 9 positions, max_model_len"),
        *of_runner[with_runner],
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            with pytest.raises(ConfigError, match=f"^speculative_config.method=eagle [^\\n]*: .*{refusal}"):
                check_options(config)
    with monkeypatch.context() as patch:  # as vLLM 0.33 does for a drafter with fewer positions
        for model in (speculative.draft_model_config, config.model_config):
            patch.setattr(model, "max_model_len", 9)
        with pytest.raises(ConfigError, match=r"the drafter takes 9 positions, max_model_len is [1-9]\d\d"):
            check_options(config)
    check_options(config)
    alone = with_eagle(heads, {"method": "keyed"})
    monkeypatch.setattr(alone.model_config, "logits_processors", ["json.JSONDecoder"])
    with pytest.raises(ConfigError, match=r"^logits_processors: vLLM does not run custom"):
        check_options(alone)
    adapters = "enable_lora: vLLM cannot apply a LoRA adapter to draft tokens"
    with pytest.raises(ConfigError, match=rf"^speculative_config\.method=eagle [^\n]*: {adapters}$"):
        with_eagle(heads, {}, enable_lora=True)
    if with_runner == "V1":
        with monkeypatch.context() as patch:
            patch.setattr(config.scheduler_config, "async_scheduling", True)
            with pytest.raises(ConfigError, match=r"^async_scheduling: must be False with vLLM's MRV1$"):
                check_options(config)
        monkeypatch.setattr(checks.current_platform, "is_cuda_alike", lambda: True)
        monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample", lambda self: None)
        with pytest.raises(PatchError, match=r"GPUModelRunner\._sample takes self\."):
            check_options(config)
        monkeypatch.setattr(SpecDecodeBaseProposer, "_sample_draft_tokens", lambda self, logits: logits)
        with pytest.raises(PatchError, match=r"Proposer\._sample_draft_tokens takes self, logits\."):
            check_options(config)
