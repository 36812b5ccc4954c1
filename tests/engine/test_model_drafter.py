"""A model drafts on model runner V2: vLLM's own speculators on the CPU, their Triton kernels interpreted."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest

from rollout_spec.config import ConfigError
from rollout_spec.vllm import plugin
from rollout_spec.vllm.checks import check_options, runner_v2_misfit
from rollout_spec.vllm.features import version
from tests.engine.conftest import engine_settings, make_tiny
from tests.engine.test_runner_v2 import interpreted

pytestmark = pytest.mark.skipif(
    version() == "0.23.0" and runner_v2_misfit() is not None, reason="V2 of 0.23 is not ours"
)
HIDDEN_SIZE = 128


def make_head(target: pathlib.Path, folder: pathlib.Path, reads: str) -> None:
    """An EAGLE head: a target's last layer behind what `fc` takes of its input, the token or the state."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    weights = load_file(target / "model.safetensors")
    zero, one = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE), torch.eye(HIDDEN_SIZE)
    head = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "fc.weight": torch.cat([one, zero] if reads == "token" else [zero, one], 1),
    }
    last = "model.layers.1."
    for name, value in weights.items():
        if name.startswith(last) and "input_layernorm" not in name:
            head["layers.0." + name.removeprefix(last)] = value
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(head, folder / "model.safetensors")


def make_bigrams(folder: pathlib.Path) -> None:
    """A model whose layers do nothing, so that the last token alone decides: a head can be the same model."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny("Llama", folder)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    embedded = weights["model.embed_tokens.weight"]
    embedded.copy_(torch.sign(embedded))  # the norm behind the layers, which a head lacks, leaves it as it is
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def heads(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    models = tmp_path_factory.mktemp("heads")
    for name in ("target", "copy"):
        shutil.copytree(tiny_model, models / name)
    make_bigrams(models / "bigrams")
    make_head(models / "target", models / "eagle", reads="state")
    make_head(models / "bigrams", models / "bigrams-eagle", reads="token")
    return models


@pytest.fixture(scope="module")
def results(heads: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("model_drafter") / "results.json"
    return interpreted("tests.engine.interpreted_model", str(heads), path)


def assert_same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for one, expected in zip(found["requests"], plain["requests"], strict=True):
        assert (one["tokens"], one["end"]) == (expected["tokens"], expected["end"])
        for row, other in zip(one["logprobs"], expected["logprobs"], strict=True):
            assert row == pytest.approx(other, abs=2e-4)


def test_a_models_drafts_change_nothing(results: dict[str, Any]) -> None:
    assert_same(results["model"], results["plain"])
    counted = results["model"]["counted"]
    assert 0 < counted["accepted_tokens"] < counted["draft_tokens"]


def test_the_target_as_its_own_drafter_is_accepted_whole(results: dict[str, Any]) -> None:
    """Its drafts share the target's noise, at every temperature."""
    counted = results["same"]["counted"]
    assert counted["accepted_tokens"] == counted["draft_tokens"] > 40


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({}, None),
        ({"enable_lora": True}, "enable_lora: a draft's token has no adapter of its own"),
        ({"runner": "V1"}, "this engine does not have vLLM's model runner V2"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused_by_name(
    arguments: dict[str, Any], refusal: str | None, heads: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    if arguments.pop("runner", None) is None:
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    settings = engine_settings(str(heads / "target")) | arguments
    settings["additional_config"] = {"rollout_spec": {"method": "off"}}
    settings["speculative_config"] = {
        "method": "eagle", "model": str(heads / "eagle"), "num_speculative_tokens": 3,
    }  # fmt: skip
    if refusal is None:
        config = EngineArgs(**settings).create_engine_config()
        # vLLM itself refuses it of many heads.
        config.parallel_config.pipeline_parallel_size, refusal = 2, "pipeline_parallel_size must be 1"
        with pytest.raises(ConfigError, match=refusal):
            check_options(config)
        return
    message = f"^speculative_config.method=eagle with rollout_spec: {refusal}$"
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**settings).create_engine_config()
