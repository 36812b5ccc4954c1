"""MRV2 with our drafter: vLLM's own runner on the CPU, its Triton kernels interpreted."""

import re
import shutil
from types import SimpleNamespace

import pytest
import transformers
from vllm import SamplingParams
from vllm.config import VllmConfig

from rollout_spec import patches
from rollout_spec.patches import put_before
from rollout_spec.verification.noise import make_key
from rollout_spec.vllm import plugin, speculative_config
from rollout_spec.vllm.keys import RequestKeys
from rollout_spec.vllm.refusals.checks import mrv2_misfit
from rollout_spec.vllm.versions import is_before, mrv2_architectures
from tests.engine.conftest import EXPERTS, configured, make_tiny
from tests.engine.interpreted_runner import BAD_WORDS
from tests.engine.interpreting import NEEDS_MRV2, WITH_GRAPHS, assert_stopped, interpreted, on_cuda, scenarios
from tests.engine.serving import assert_each_same, assert_none_is_idle, assert_same

# An engine takes minutes, and other tests have the processors too.
pytestmark = [NEEDS_MRV2, pytest.mark.timeout(1800)]
AHEAD = ("ahead", "open", "preempted", "mixed")
ENGINES = ("drafted", *AHEAD)


def test_a_runner_or_a_verifier_that_has_changed_is_left_alone_and_named(monkeypatch):
    plugin.register()
    mrv2_misfit.cache_clear()
    assert mrv2_misfit() is None
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    config = VllmConfig()
    more = {"parallel_drafting": False, "uses_dynamic_speculative_decoding": lambda: False}
    config.speculative_config = SimpleNamespace(**speculative_config(8), **more)  # type: ignore[assignment]
    assert config._get_v2_model_runner_unsupported_features() == []
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, pos: None)
    mrv2_misfit.cache_clear()
    [reason] = config._get_v2_model_runner_unsupported_features()
    assert reason.startswith("rollout_spec's drafter (") and "synchronously" in reason
    assert "Sampler.sample takes self, logits, pos" in reason
    monkeypatch.undo()
    name = "_verify" if hasattr(RejectionSampler, "_verify") else "__call__"
    monkeypatch.setattr(RejectionSampler, name, lambda self, logits, pos: None)
    mrv2_misfit.cache_clear()
    assert f"RejectionSampler.{name} takes self, logits, pos" in str(mrv2_misfit())
    mrv2_misfit.cache_clear()


@pytest.mark.parametrize(
    ("name", "arguments", "refusal"),
    [
        ("Qwen2Moe", {"data_parallel_size": 2}, None),
        ("Qwen3", {}, None),
        ("Qwen3", {"enable_lora": True}, "MRV2 applies LoRA per request"),
        ("Qwen2", {}, None),
    ],
)
def test_an_engine_has_v2_where_plain_vllm_takes_it(name, arguments, refusal, tmp_path, monkeypatch):
    """But for LoRA."""
    architecture = f"{name}ForCausalLM"
    getattr(transformers, f"{name}Config")(architectures=[architecture]).save_pretrained(tmp_path)
    plain, drafted = (configured(str(tmp_path), spec, **arguments) for spec in (None, {}))
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # for which vLLM asks first
    with_mrv2 = mrv2_architectures()
    assert plain.use_v2_model_runner == (with_mrv2 is None or architecture in with_mrv2)
    assert drafted.use_v2_model_runner == (plain.use_v2_model_runner and refusal is None)
    reasons = drafted._get_v2_model_runner_unsupported_features()
    assert [refusal in reason for reason in reasons if refusal] == [True] * (refusal is not None)


def test_on_mrv2_a_request_keeps_its_key_until_it_has_ended(monkeypatch):
    """One that was preempted is added again; so is a new one under the name of one that has ended."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from rollout_spec.vllm.mrv2.sampler import COUPLED, KeyedSampler

    seeds = list[int]()

    class SomeSampler(Sampler):
        def __init__(self):
            self.req_states = SimpleNamespace(index_to_req_id={5: "a", 6: "b"})

        def add_request(self, req_idx, *others):
            seeds.append(others[-1].seed)

    monkeypatch.setattr(patches, "_applied", {})
    sampler = SomeSampler()
    sampler.keys = keys = RequestKeys(3)
    put_before(KeyedSampler, sampler, COUPLED)
    params = SamplingParams()
    for row in (5, 6, 5, 7):  # of the last there is no request
        sampler.add_request(row, params)
    keys.remove({"a"})
    sampler.add_request(5, params)
    expected = [make_key("arrival", 3, number) for number in (1, 2, 3)]
    assert seeds == [expected[0], expected[1], expected[0], None, expected[2]]
    assert params.seed is None, "it is the scheduler's"


def samples(found):
    return [sample for one in found["requests"].values() for sample in (one, *one["others"])]


@pytest.fixture(scope="module")
def served(chat_model):
    with scenarios("tests.engine.interpreted_runner", chat_model) as scenario:
        yield scenario


@pytest.mark.parametrize("engine", ["plain", "window", "plain window", *ENGINES])
def test_all_engines_have_mrv2(served, engine):
    assert_has_mrv2(served(engine))


def assert_has_mrv2(found):
    assert found["model_runner"].endswith(".cpu.model_runner"), "MRV1 is in cpu_model_runner"


def test_a_request_gets_what_it_asks_for(served):
    found = served("plain")["requests"]
    assert_none_is_idle(found)
    assert {*BAD_WORDS}.isdisjoint(found["bad_words"]["tokens"])
    assert re.fullmatch("([a-d][!-+]){7,9}", found["grammar"]["text"])
    assert [len(row) for row in found["top_k"]["logprobs"]] == [6] * 24, "the token is one of the six"


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_change_nothing(served, engine):
    assert_each_same(served(engine)["requests"], served("plain")["requests"])


@pytest.mark.skipif(mrv2_architectures() is not None, reason="vLLM 0.24 takes MRV1 for images")
def test_neither_where_prompts_have_images(served):
    plain, drafted = served("plain images"), served("images")
    assert_has_mrv2(plain)
    assert_has_mrv2(drafted)
    assert drafted["counters"]["num_accepted_tokens"] > 10
    assert {*map(str, plain["requests"].values())}.isdisjoint(map(str, served("plain")["requests"].values()))
    assert drafted["requests"] == plain["requests"]


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_are_verified_and_accepted(served, engine):
    """But for those of rows that were preempted or have ended, and what a grammar does not allow."""
    counters, steps = served(engine)["counters"], served(engine)["steps"]
    assert counters["num_accepted_tokens"] > (0 if engine == "ahead" else 20)
    assert counters["num_failed_steps"] == counters["num_untracked_rows"] == 0
    assert any(step["preempted"] for step in steps) == (engine == "preempted")
    assert not any(step["waiting_rows"] for step in steps), "a preempted request has no row"
    assert sum(step["drafts"] + step["lost"] + step["cut"] for step in steps) == counters["num_draft_tokens"]
    refusal = "not supported together with drafts: logprob_token_ids: vLLM cannot compute them"
    assert re.match(f"^rollout_spec: {refusal}[^\n]*$", served(engine)["refusal"])


def test_keys_behind_a_window_are_freed_no_earlier_than_without_drafts(served):
    asked = [served(name)["requests"] for name in ("window", "plain window")]
    tokens = [[one["tokens"] for one in found.values()] for found in asked]
    assert tokens[0] == tokens[1]
    assert served("window")["counters"]["num_accepted_tokens"] > 50
    assert any(step["in_flight"] for step in served("window")["steps"]) == (not is_before(29))


@pytest.mark.parametrize("engine", AHEAD)
def test_steps_are_scheduled_ahead_with_drafts_and_without(served, engine):
    steps = served(engine)["steps"]
    for is_drafted in (True, False):
        in_flight = [step["in_flight"] for step in steps if (step["drafts"] > 0) == is_drafted]
        assert len(in_flight) > 3
        assert sum(in_flight) >= (0.9 if is_drafted else 0.6) * len(in_flight)


def test_no_step_is_scheduled_ahead_where_nobody_asks_for_it(served):
    assert not any(step["in_flight"] for step in served("drafted")["steps"])


@pytest.mark.parametrize("engine", ["ahead", "open"])
def test_an_engine_core_schedules_in_every_call(served, engine):
    """After a call that runs nothing it sleeps, and a rank of experts runs a dummy batch."""
    assert re.fullmatch("(ran )+(idle )*", served(engine)["calls"])


@pytest.mark.parametrize("engine", ["drafted", "ahead", "open"])
def test_every_token_is_indexed_once(served, engine):
    """Those that a step gave after a stop string too."""
    counters = served(engine)["counters"]
    found = samples(served(engine))
    num_tokens = sum(len(one["tokens"]) for one in found)
    num_more = counters["num_row_steps"] + counters["num_accepted_tokens"] - num_tokens
    assert 0 <= num_more <= 8 * sum(isinstance(one["end"][1], str) for one in found)


@pytest.mark.parametrize("engine", ["drafted", "ahead", "open"])
def test_requests_go_on_where_their_cache_is_dropped_or_drafting_fails(served, engine):
    """Nothing is lost or there twice of a step that was in flight, for the drafter neither."""
    found = served(engine)
    assert len(found["reset_in_flight"]) > 3 and any(found["reset_in_flight"]) == (engine != "drafted")
    for name, tokens in found["reset"].items():
        assert tokens == served("plain")["requests"][name]["tokens"], name
    assert sorted(found["reset"].values()) == sorted(found["reset_history"][-len(found["reset"]) :])
    assert found["failing"]["sampled"] == served("plain")["requests"]["sampled"]
    assert found["num_failed_steps"] > 8


@pytest.mark.parametrize("engine", ["drafted", "ahead", "open"])
def test_a_weight_sync_interrupts_and_the_history_helps_behind_it(served, engine):
    found, sampled = served(engine), served("plain")["requests"]["sampled"]
    assert found["interrupted"] == sampled["tokens"], "aborted, it goes on as another request"
    before, after = found["sync_in_flight"]
    assert (before > 0, after) == (engine != "drafted", 0), "what is in flight is of the old policy"
    responses = [found["interrupted"], *(one["tokens"] for one in samples(found))]
    for response in responses:  # a longer one may have taken its place
        assert any(kept[: len(response)] == response for kept in found["history"])
    # The four aborted had said something too, which stays; one goes on if its sender has had all of it.
    others = [kept for kept in found["history"] if not any(is_of(kept, each) for each in responses)]
    assert len(others) in (3, 4)
    assert all(kept == sampled["tokens"][: len(kept)] for kept in others)
    assert_stopped(found, sampled)
    counters = found["counters_behind"]
    assert counters["num_accepted_tokens"] > len(found["stopped"]["tokens"]) / 2
    assert counters["num_failed_steps"] == 0


def is_of(kept, response):
    """A step may give 8 tokens after a stop."""
    return kept[: len(response)] == response and len(kept) <= len(response) + 8


def test_certify_explains_differences_by_the_noise_of_mrv2(chat_model, tmp_path):
    """The tokens that were drawn need no other logits; any other needs clearly other ones."""
    found = interpreted("tests.engine.interpreted_certify", tmp_path / "gaps.json", chat_model)
    assert found["is_mrv2"] and all(found["same"])
    assert max(found["drawn"]) < 1e-4 and sorted(found["others"])[3] > 0.1


# With FULL the same graphs are for any step; of random mixtures hardly a step is a plain one.
KINDS = {"whole": ("plain",), "mixed": ("drafts",), "mixed decode": ("drafts",)}
MORE = {
    **dict.fromkeys(("all of life", "waiting", "preempted"), "plain"),
    **({} if is_before(32) else {"whole": "plain"}),
    "one token": "plain one token",
    **dict.fromkeys(("mixed", "mixed decode"), "plain mixed"),
    "experts": "plain experts",
    "returned": "plain returned",
}


@pytest.fixture(scope="module")
def on_graphs(chat_model, tmp_path_factory):
    models = tmp_path_factory.mktemp("graphs") / "models"
    shutil.copytree(chat_model, models / "target")
    make_tiny("Qwen2Moe", models / "experts", **EXPERTS)
    with on_cuda(models) as scenario:
        yield scenario


@WITH_GRAPHS
@pytest.mark.parametrize("engine", ["open", "gate"])
def test_graphs_change_nothing(on_graphs, engine):
    assert_graphs_change_nothing(on_graphs(engine), on_graphs("plain"))


@WITH_GRAPHS
def test_no_step_and_no_warm_up_has_more_rows_of_logits_than_the_profile(on_graphs):
    """Beyond that memory is the KV cache's."""
    rows = on_graphs("open")["rows"]  # 16 requests, 24 draft tokens
    assert rows["profile"] == 40 >= rows["later"] > 30


@WITH_GRAPHS
@pytest.mark.long
@pytest.mark.parametrize(("engine", "plain"), MORE.items())
def test_graphs_change_nothing_of_all_that_a_step_can_be(on_graphs, engine, plain):
    if engine == "returned" and is_before(32):
        pytest.skip("on CPUs vLLM 0.29 returns no experts, and 0.24 takes MRV1; 0.32 does")
    found, served = on_graphs(engine), on_graphs(plain)["requests"]
    assert_graphs_change_nothing(found, on_graphs(plain), KINDS.get(engine, ("plain", "drafts")))
    if engine == "all of life":
        assert found["interrupted"] == served["sampled"]["tokens"]
        assert_same(found["failing"]["sampled"], served["sampled"])
        for name, tokens in found["reset"].items():
            assert tokens == served[name]["tokens"], name
    assert engine != "preempted" or any(step["preempted"] for step in found["steps"])
    assert {one["experts"] is not None for one in served.values()} == {engine == "returned"}


def assert_graphs_change_nothing(found, plain, kinds=("plain", "drafts")):
    """Beside eager vLLM; and there was nothing that a GPU would not forgive."""
    assert_each_same(found["requests"], plain["requests"])
    assert found["faults"] == found["waits"] == {}
    assert found["counters"]["num_failed_steps"] == 0 < found["counters"]["num_accepted_tokens"]
    for steps in kinds:
        assert found["replays"][f"ModelCudaGraphManager {steps}"] > 2
