"""The roofline: sizes as published and built, terms by hand, errors on record, recipes that fit devices."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_spec_lab.roofline.model import Model, RooflineError
from rollout_spec_lab.roofline.roofline import DEVICES, Device, Roofline
from tests.configs import composed_recipe, recipe_layouts

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted(ROOT.glob("recipes/models/*.json"))}
# No floor, links without latency: what is left are bytes and FLOPs.
BARE = Device(1e12, 1e9, 1e12, 0.85, 0.55, 0.0, 1e8, 0.0, 1e7, 0.0)
# What an engine gets of these.
FLOPS, BYTES_PER_S = 0.55e12, 0.85e9
DENSE = Model(64, 2, 4, 2, 16, 128, 1000)
SPARSE = dataclasses.replace(DENSE, num_experts=16, num_experts_per_token=2)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("qwen3_8b", 8.2, 8.2), ("qwen3_32b", 32.8, 32.8), ("qwen3_235b", 235.0, 22.2)],
)
def test_recipes_have_the_published_sizes(name, billions, active):
    model = Model.read(RECIPES[name])
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    unused = (model.num_experts - model.num_experts_per_token) * model.expert_params
    assert (model.num_params - unused) / 1e9 == pytest.approx(active, rel=0.02)
    assert set(RECIPES) == {"qwen3_8b", "qwen3_32b", "qwen3_235b"}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 640, "vocab_size": 1000,
}  # fmt: skip


# Four of the six layers, with states of 8 x 64 x 32.
LINEAR = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_value_head_dim": 64,
    "linear_key_head_dim": 32, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "num_expert_layers"),
    [
        ("qwen3", {}, 0),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 6),
        ("qwen3_moe", EXPERTS | {"num_experts": 4}, 6),
        ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 160}, 6),
        ("glm4_moe", EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 3, "first_k_dense_replace": 2}, 4),
        ("qwen3_5_text", LINEAR, 0),
        ("qwen3_next", LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 160}, 6),
    ],
)
def test_a_model_has_the_parameters_that_transformers_builds(kind, changes, num_expert_layers, tmp_path):
    config = AutoConfig.for_model(kind, **SHAPE, **changes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config).num_parameters()
    model = Model.read(tmp_path / "config.json")
    # It counts norms and biases too.
    assert 0.997 * built < model.num_params <= built
    assert model.num_expert_layers == num_expert_layers


def read(folder, fields):
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return Model.read(folder / "config.json")


def of_context(roofline):
    """Seconds for 1000 tokens of context."""
    return roofline.seconds(7, False, num_context=1000) - roofline.seconds(7, False)


def of_drafts(roofline):
    """Seconds that 3 rows take longer where 4 of 7 tokens are draft tokens."""
    return roofline.seconds(7, True, num_rows=3) - roofline.seconds(7, False, num_rows=3)


def test_context_costs_the_bytes_of_its_keys_and_values():
    more = of_context(Roofline(DENSE, BARE))
    assert more == pytest.approx(1000 * 2 * 2 * 2 * 16 * 2 / BYTES_PER_S)
    assert Roofline(DENSE, BARE).row_tokens(3) == 0
    # Two devices have a head each, four have the same two twice.
    costs = [of_context(Roofline(DENSE, BARE, tensor_parallel=tp)) for tp in (2, 4)]
    assert costs == pytest.approx([more / 2, more / 2])


# As Nemotron-H-8B has it: of the published config.json.
NEMOTRON_H = {
    "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attention_head_dim": 128, "intermediate_size": 21504, "vocab_size": 131072, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 8,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "num_recurrent", "of_state", "of_window", "of_kv"),
    [
        # How many layers have states, the numbers in one, in its window; in the keys of all other layers.
        (SHAPE | LINEAR | {"mamba_ssm_dtype": "float32"}, 4, 8 * 64 * 32, 8 * 64 + 2 * 4 * 32, 2 * 2 * 64),
        (NEMOTRON_H, 24, 128 * 64 * 128, 128 * 64 + 2 * 8 * 128, 4 * 8 * 128),
    ],
)
def test_recurrent_layers_cost_their_states_and_no_keys_and_values(
    fields, num_recurrent, of_state, of_window, of_kv, tmp_path
):
    roofline = Roofline(read(tmp_path, fields), BARE)
    size, window, kv = num_recurrent * of_state * 4, num_recurrent * of_window * 2, 2 * of_kv * 2
    assert of_context(roofline) == pytest.approx(1000 * kv / BYTES_PER_S)
    # A plain step of 3 rows reads and writes 3 states; with 4 draft tokens it writes 7.
    assert of_drafts(roofline) == pytest.approx(4 * size / BYTES_PER_S)
    prompt = roofline.seconds(500, False, num_rows=3) - roofline.seconds(500, False, num_rows=2)
    assert prompt == pytest.approx(2 * size / BYTES_PER_S)
    for k in (0, 3):  # 2 + K states, in tokens
        assert roofline.row_tokens(k) == (2 + k) * (size + window * (3 + k)) / kv


def test_states_are_as_wide_as_what_the_policy_computes_in(tmp_path):
    AutoConfig.for_model("qwen3_next", **SHAPE, **LINEAR).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    models = [read(tmp_path, fields | {"dtype": dtype}) for dtype in ("bfloat16", "float32")]
    narrow, wide = (model.states.num_bytes(3) for model in models if model.states)
    assert wide == 2 * narrow


def test_layers_of_mamba_2(tmp_path):
    assert read(tmp_path, NEMOTRON_H).num_params == pytest.approx(8.1e9, rel=0.01), "as its name says"
    with pytest.raises(RooflineError, match="ssm_state_size: such models are not modelled"):
        read(tmp_path, NEMOTRON_H | {"hybrid_override_pattern": "ME*"})


def test_tensor_parallel_devices_share_the_weights_and_pay_for_two_all_reduces_a_layer():
    fast = dataclasses.replace(BARE, link_s=1e-3)
    params = DENSE.shared_params
    rest = Roofline(DENSE, BARE).seconds(1, False) - 2 * params / BYTES_PER_S
    halves = 2 * params / 2 / BYTES_PER_S
    all_reduces = 2 * 2 * (1e-3 + 2 * 1 / 2 * 64 * 2 / 1e8)
    two = Roofline(DENSE, fast, tensor_parallel=2).seconds(1, False)
    assert two == pytest.approx(halves + rest + all_reduces, rel=1e-3)


def test_the_floor_and_the_stretch():
    slow = dataclasses.replace(BARE, launch_s=0.5)
    plain, floored = Roofline(DENSE, BARE), Roofline(DENSE, slow)
    assert floored.seconds(3, False) - plain.seconds(3, False) == pytest.approx(2 * 0.5)
    stretched = Roofline(DENSE, BARE, stretch=3.0)
    assert stretched.seconds(3, False, 500) == pytest.approx(3 * plain.seconds(3, False, 1500))
    assert stretched.kv_tokens == pytest.approx(plain.kv_tokens / 3)


def test_a_step_waits_for_the_host_where_something_drafts():
    host = {False: (0.25, 0.5), True: (1.0, 2.0)}
    plain, hosted = Roofline(DENSE, BARE), Roofline(DENSE, BARE, host=host, stretch=3.0)
    for drafted, of_host in ((False, 2.25), (True, 9.0)):
        device = plain.seconds(9, drafted, 0, 0, 4)
        assert hosted.seconds(9, drafted, 0, 0, 4) == pytest.approx(3 * (device + of_host))
    assert hosted.without_drafter.seconds(9, False, 0, 0, 4) == pytest.approx(3 * plain.seconds(9, False))


def test_data_parallel_ranks_share_the_experts_and_their_tokens():
    alone = Roofline(SPARSE, BARE, data_parallel=4)
    assert alone.seconds(2, False, 0, 60) > 1.2 * alone.seconds(2, False)
    # An idle rank serves the others' tokens too.
    assert alone.seconds(0, False, 0, 62) > 0.5 * alone.seconds(2, False, 0, 60)
    assert alone.kv_tokens > Roofline(SPARSE, BARE).kv_tokens


def config(**changes):
    fields = json.loads(RECIPES["qwen3_235b"].read_text()) | changes
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 must be a whole number from 1"),
        ({"vocab_size": "many"}, "vocab_size: 'many' must be a whole number"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: is missing"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: must be at most num_experts, 128"),
        ({"torch_dtype": "int4"}, "torch_dtype: 'int4' must be one of bfloat16, float16, float32"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: MLA is not modelled"),  # DeepSeek-V3
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantized weights are not"),
        *(
            ({**more, name: value}, f"{name}: such models are not modelled")
            for name, value, more in (
                ("sliding_window", 4096, {}),  # Mistral-7B
                ("sliding_window", 4096, {"use_sliding_window": True}),
                ("full_attention_interval", 4, {}),
                ("moe_layer_freq", 2, {}),
                ("layer_types", ["full_attention", "linear_attention"], {}),
                ("ssm_state_size", 128, {}),  # Nemotron-H
                ("mamba_d_state", 128, {}),  # Falcon-H1
            )
        ),
        ({"num_experts": None}, "num_experts_per_tok: needs the number of experts, one of num_experts, "),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: -1 must be a whole number from 0"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: such models are not modelled"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers: such models are not modelled"),
        ({"n_shared_experts": 1.5}, "n_shared_experts: 1.5 must be a whole number from 1"),
    ],
)
def test_a_config_that_cannot_be_read(changes, message, tmp_path):
    with pytest.raises(RooflineError, match=message) as error:
        read(tmp_path, config(**changes))
    assert str(error.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(error.value)


def test_a_config_that_nests_its_text_model_is_read_as_hugging_face_does(tmp_path):
    nested = AutoConfig.for_model("qwen3_vl", text_config=SHAPE, tie_word_embeddings=True)
    nested.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    text_config, found = whole["text_config"], Model.read(tmp_path / "config.json")
    flat = read(tmp_path, text_config)
    assert found == dataclasses.replace(flat, ties_embeddings=True), "said beside text_config"
    for broken, message in (
        ({"model_type": "x", "text_config": {}}, "text_config: hidden_size: is missing"),
        ({"text_config": text_config}, "text_config: .*model_type"),
        (whole | {"quantization_config": {"bits": 8}}, "quantization_config: quantized"),
    ):
        with pytest.raises(RooflineError, match=message):
            read(tmp_path, broken)


def test_a_config_that_is_none_and_what_older_ones_leave_out(tmp_path):
    for text in ("", "{", "[]", '"config"'):
        with pytest.raises(RooflineError, match="JSON"):
            read(tmp_path, text)
    model = read(tmp_path, config(num_key_value_heads=None, head_dim=None, torch_dtype=None))
    assert (model.num_kv_heads, model.head_dim, model.bytes_per_value) == (64, 64, 2)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("qwen3_235b", {"tensor_parallel": 4}, "--tp 4 --dp 1: 118 GB of weights a device do not fit"),
        ("qwen3_32b", {"tensor_parallel": 3}, "--tp 3: does not divide the model's 64 heads and 8 KV heads"),
        ("qwen3_8b", {"data_parallel": 2}, "--dp 2: a dense model's ranks do not wait"),
    ],
)
def test_a_layout_that_cannot_be(name, layout, message):
    with pytest.raises(RooflineError, match=message):
        Roofline(Model.read(RECIPES[name]), DEVICES["h100"], **layout)


PUBLISHED = json.loads((ROOT / "lab/tests/data/published_step_times.json").read_text())
MODELS = {name: Model.read(path) for name, path in RECIPES.items()}
MODELS |= {name: Model(**shape) for name, shape in PUBLISHED["models"].items()}


def errors(pair):
    """Of each published step its number of tokens, and the prediction's error as a share of its time.

    A step has rows, the mean length of a row while it decodes, and milliseconds. A fourth number is that of
    the prompt's tokens, whose prefill is a 2,048th part of the milliseconds; a fifth the draft tokens a row.
    """
    roofline = Roofline(
        MODELS[pair["model"]], DEVICES[pair["gpu"]], pair["tp"],
        expert_parallel=pair["expert_parallel"], memory_share=0.99,
    )  # fmt: skip
    for rows, context, milliseconds, *more in pair["steps"]:
        num_prompt, num_drafted = [*more, 0, 0][:2]
        num_tokens = rows * (1 + num_drafted)
        seconds = roofline.seconds(num_tokens, False, int(rows * context))
        if num_prompt:
            seconds += roofline.seconds(num_prompt, False) / 2048
        yield num_tokens, 1e3 * seconds / milliseconds - 1.0


def test_published_step_times_are_met_as_the_record_says():
    def mean_error(pairs):
        return np.mean([abs(error) for pair in pairs for _, error in errors(pair)])

    assert mean_error(PUBLISHED["calibration"]) < 0.02
    of_recipes = [pair for pair in PUBLISHED["check"] if pair["model"] in RECIPES]
    assert {pair["model"] for pair in of_recipes} == set(RECIPES)
    assert mean_error(of_recipes) < 0.13
    assert mean_error(PUBLISHED["check"]) < 0.20


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_published_steps_with_drafts_are_met_however_many_tokens_they_verify(device):
    found = [one for pair in PUBLISHED["verified"] if pair["gpu"] == device for one in errors(pair)]
    for low, high in ((1, 65), (65, 257), (257, 1025)):
        of_range = [error for num_tokens, error in found if low <= num_tokens < high]
        assert np.mean(np.abs(of_range)) < 0.10
        assert abs(np.mean(of_range)) < 0.09


@pytest.mark.parametrize(("recipe", "size", "device", "mode"), recipe_layouts())
def test_a_recipe_fits_its_device(recipe, size, device, mode):
    """Weights, the buffers of a step, and the longest responses of a tail of 8 on each rank."""
    model = Model.read(RECIPES[size])
    rollout = composed_recipe(recipe, size, f"rollout_spec_device={device}").actor_rollout_ref.rollout
    # Two for each expert of a token; vLLM gathers the tokens of all ranks.
    num_tokens = rollout.max_num_batched_tokens * rollout.data_parallel_size
    buffers = 2 * num_tokens * model.num_experts_per_token * model.hidden_size * model.bytes_per_value
    for name in {"gpu": ("a100", "h100"), "npu": ("910b",)}[device]:
        whole = DEVICES[name]
        rest = whole.memory_bytes - buffers / rollout.gpu_memory_utilization
        kept = dataclasses.replace(whole, memory_bytes=rest)
        ranks = rollout.tensor_model_parallel_size, rollout.data_parallel_size
        has_experts = rollout.expert_parallel_size > 1
        engine = Roofline(model, kept, *ranks, has_experts, rollout.gpu_memory_utilization)
        assert engine.kv_tokens > 8 * rollout.max_model_len
