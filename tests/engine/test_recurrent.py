"""Policies with recurrent layers: with drafts they give the tokens that they give without.

The layers are in plain torch (`recurrent_layers.py`): where states are kept and read is vLLM's own doing.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from rollout_spec import recurrent
from rollout_spec.vllm import plugin
from rollout_spec.vllm.upstream import recurrent_rows
from rollout_spec.vllm.versions import minor, version
from tests.engine.conftest import OFF, configured
from tests.engine.recurrent_layers import replace_layers
from tests.engine.recurrent_scenarios import FAST, SHORT_STEPS, served
from tests.engine.tiny_recurrent import make_recurrent

MINOR = minor(version() or "") or 99
# 0.24 runs no Qwen3.5 of text alone; 0.23 has no such drafts.
MODEL = "qwen3_next" if MINOR == 24 else "qwen3_5"
GATED = {"num_speculative_tokens": 7, "batch_threshold": 4}
# Scenarios whose tokens depend on earlier requests, without drafts too (see the test below).
UNDEFINED = {"single_tokens"} if MINOR < 32 else set[str]()

pytestmark = pytest.mark.skipif(MINOR < 24, reason="refused, as the driver's tests show")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny model; engines from here on have the layers in torch."""
    plugin.register()
    replace_layers()
    return make_recurrent(MODEL, tmp_path_factory.mktemp(MODEL))


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own treatment of recurrent layers."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for owner, name in (
        (GDNAttentionMetadataBuilder, "build"),
        (GPUModelRunner, "_prepare_inputs"),
        (GPUModelRunner, "_build_attention_metadata"),
    ):
        current = getattr(owner, name)
        if hasattr(current, "__rollout_spec_patch__"):
            monkeypatch.setattr(owner, name, current.__wrapped__)
    monkeypatch.setattr(recurrent_rows, "mend", lambda _: None)


def wrong(drafted: dict[str, Any], plain: dict[str, Any]) -> set[str]:
    """The scenarios with other tokens."""
    assert drafted["counters"]["num_accepted_tokens"] > 50
    assert drafted["counters"]["num_failed_steps"] == 0
    assert drafted["rows"]["alone"] > 0, "rows without a draft behind one, in steps without drafts"
    return {name for name in plain if plain[name] != drafted[name]} - UNDEFINED


@pytest.fixture(scope="module")
def results(model: str) -> dict[str, dict[str, Any]]:
    return {
        name: served(model, spec, FAST, **SHORT_STEPS)
        for name, spec in {"drafted": GATED, "plain": None}.items()
    }


def test_drafts_change_nothing(results: dict[str, dict[str, Any]]) -> None:
    rows = results["drafted"]["rows"]
    assert rows["beside drafts"] > 0 and rows["left out"] > 0
    assert wrong(results["drafted"], results["plain"]) == set()


def test_before_0_32_a_prompt_of_one_token_reads_an_old_state_without_drafts_too(
    results: dict[str, dict[str, Any]],
) -> None:
    """Linear attention takes it for a decoding row, which reads what an earlier request left in its block."""
    plain = results["plain"]
    assert (plain["single_tokens"] == plain["fresh_single_tokens"]) == (MINOR >= 32)


def test_a_full_graph_of_plain_steps_is_for_decoding_rows(results: dict[str, dict[str, Any]]) -> None:
    """On MRV1, which takes it by a step's shape."""
    steps = results["drafted"]["graphs"]
    assert (False, True, True) in steps
    assert (True, True, False) in steps and (True, True, True) not in steps, "prompts of one token left"


def test_the_states_are_as_large_as_the_driver_says(results: dict[str, dict[str, Any]], model: str) -> None:
    assert results["drafted"]["state_bytes"] == said_bytes(model, 7)


def said_bytes(model: str, k: int) -> int:
    states = recurrent.states_of(json.loads((pathlib.Path(model) / "config.json").read_text()), dtype_bytes=4)
    assert states is not None
    return states.num_bytes(k)


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "arguments"),
    [({"num_speculative_tokens": 3}, {}), (GATED, SHORT_STEPS)],
    ids=["K=3", "K=7, gate and chunks"],
)
def test_drafts_change_nothing_in_any_scenario(
    model: str, spec: dict[str, Any], arguments: dict[str, Any]
) -> None:
    drafted = served(model, spec, **arguments)
    assert wrong(drafted, served(model, None, **arguments)) == set()
    assert drafted["state_bytes"] == said_bytes(model, spec["num_speculative_tokens"])


@pytest.mark.long
@pytest.mark.skipif(MINOR < 29, reason="no Mamba 2 on CPUs")
def test_layers_of_mamba_2_are_refused_for_a_reason(
    model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of up to K + 1 tokens of a resumed request passes for a draft: the states go to wrong slots."""
    monkeypatch.setattr(recurrent, "refusal", lambda *_: None)
    folder = make_recurrent("nemotron_h", tmp_path)
    drafted, plain = (served(folder, spec, **SHORT_STEPS) for spec in (GATED, None))
    assert wrong(drafted, plain) == {"preempted"}


@pytest.mark.long
def test_the_mend_is_needed_until_vllm_is_right(model: str, as_it_is: None) -> None:
    assert bool(wrong(served(model, GATED), served(model, None))) == (MINOR < 32)


@pytest.mark.long
@pytest.mark.skipif(MINOR < 29, reason="refused: MRV2 of 0.24 has no prefix caching for them")
def test_drafts_change_nothing_on_mrv2(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.engine.recurrent_scenarios", "qwen3_5_small", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(path.read_text())
    assert results["drafted"]["model_runner"].endswith(".cpu.model_runner")
    assert wrong(results["drafted"], results["plain"]) == set()


NEXT, LFM, JAMBA = "Qwen3Next", "Lfm2", "Jamba"
MIXED = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}


@pytest.mark.parametrize(
    ("stem", "fields", "k", "message"),
    [
        (NEXT, {}, 15, r"^rollout\.spec\.num_speculative_tokens=15: must be at most 7 with [^\n]*\Z"),
        (LFM, MIXED, 3, r"^rollout\.spec\.method=sam: Lfm2ForCausalLM gives tokens that depend on [^\n]*\Z"),
        (JAMBA, {}, 3, r"^rollout\.spec\.method=sam: JambaForCausalLM has layers of Mamba 1[^\n]*\Z"),
    ],
)
def test_refused_before_an_engine_process_is_launched(
    stem: str, fields: dict[str, Any], k: int, message: str, tmp_path: pathlib.Path
) -> None:
    import transformers

    config = getattr(transformers, f"{stem}Config")(architectures=[f"{stem}ForCausalLM"], **fields)
    config.save_pretrained(tmp_path)
    configured(str(tmp_path), **OFF)
    with pytest.raises(ValueError, match=message):
        configured(str(tmp_path), {"num_speculative_tokens": k})


@pytest.mark.parametrize("mode", ["all", "some"])
def test_a_cache_mode_that_is_not_known_is_refused(
    model: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_spec.vllm.checks import check_options

    config = configured(model, {"num_speculative_tokens": 3})
    check_options(config)
    monkeypatch.setattr(config.cache_config, "mamba_cache_mode", mode)
    with pytest.raises(ValueError, match=rf"^mamba_cache_mode={mode}: must be none or align [^\n]*\Z"):
        check_options(config)
