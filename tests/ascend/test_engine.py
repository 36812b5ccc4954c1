"""Whole engines of vllm-ascend, its worker and forward pass too, on the stub's stand-ins for its kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.envs import disable_envs_cache

from rollout_spec_lab.bench import engine_worker
from rollout_spec_lab.cli import gpu_check, main
from tests.engine.conftest import chat_model, own_environment, tiny_model  # noqa: F401

REQUESTS = [{"prompt": i % 2, "max_tokens": 40, "name": [0, i]} for i in range(6)]
PROMPTS = [[1, *[5, 9] * 6, 7 + i] for i in range(2)]


@pytest.fixture(scope="module", autouse=True)
def environment_of_engines() -> Iterator[None]:
    with own_environment():
        yield
    disable_envs_cache()  # with which an engine has begun: other tests set variables


def test_an_engine_gives_the_same_tokens_with_drafts(tiny_model: str) -> None:  # noqa: F811
    job: dict[str, Any] = {
        "model": tiny_model, "dtype": "float32", "seed": 0, "natural_ends": False, "prompts": PROMPTS,
        "requests": REQUESTS, "temperature": 0.3, "num_speculative_tokens": None,
        "engine": {"max_num_seqs": 8, "max_model_len": 256, "enforce_eager": True},
        "spec": {"history": 0},
    }  # fmt: skip
    plain, drafted = (engine_worker.run(job | {"method": method}) for method in ("off:coupled", "sam:64"))
    assert drafted["responses"] == plain["responses"]
    assert drafted["counters"]["num_accepted_tokens"] > 20
    assert drafted["settings"]["device"] == "stub of an NPU"


@pytest.mark.skipif(
    metadata.version("vllm-ascend") != "0.23.0", reason="one release is enough for the command"
)
def test_gpu_check_does_all_its_parts(
    chat_model: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the docs have a first user run it, with a CPU's load: the stub says that it is an accelerator."""
    small = gpu_check.SIZES[False] | {"contexts": [64], "nums_rows": [1, 4], "nums_drafts": [0, 15]}
    monkeypatch.setitem(gpu_check.SIZES, True, small)
    options = ["--minutes", "60", "--repeats", "1", "--methods", "off,sam", "--output", str(tmp_path)]
    assert main(["gpu-check", "--model", chat_model, "--eager", *options]) == 0
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    reasons = {part["part"]: part["reason"] for part in record["parts"] if part["status"] != "done"}
    assert reasons == {}
    assert record["environment"]["device"] == "stub of an NPU"
    assert record["environment"]["vllm-ascend"] == metadata.version("vllm-ascend")
    assert record["certify"]["verdict"].startswith("identical")
    assert record["rollouts"]["engines"]["sam"]["num_speculative_tokens"] == 15
    assert {row["num_drafts"] for row in record["steps"]["steps"]} == {0, 15}
