"""`gpu-check` in the published vllm-ascend; torch_npu is a stub."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from rollout_spec.vllm import ascend

ascend.import_worker()  # or vllm-ascend's modules import each other in circles
from rollout_spec_lab.cli import main  # noqa: E402
from rollout_spec_lab.gpu_check import plan  # noqa: E402


@pytest.mark.skipif(
    metadata.version("vllm-ascend") != [*ascend.PAIRS][-1],
    reason="the command is the same on each; the run on the newest release has it",
)
def test_gpu_check_does_all_its_parts(
    chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the docs have a first user run it, with a CPU's load: the stub says that it is an accelerator."""
    small = plan.CPU._replace(contexts=[64], nums_rows=[1, 4], nums_drafts=[0, 15])
    monkeypatch.setattr(plan, "ACCELERATOR", small)
    options = ["--minutes", "60", "--repeats", "1", "--methods", "off,sam", "--output", str(tmp_path)]
    assert main(["gpu-check", "--model", chat_model, "--engine", '{"enforce_eager": true}', *options]) == 0
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    reasons = {part["part"]: part["reason"] for part in record["parts"] if part["status"] != "done"}
    assert reasons == {}
    assert record["environment"]["device"] == "stub of an NPU"
    assert record["environment"]["vllm-ascend"] == metadata.version("vllm-ascend")
    assert record["certify"]["verdict"].startswith("certified")
    assert record["rollouts"]["engines"]["sam"]["num_speculative_tokens"] == 15
    assert {row["num_drafts"] for row in record["steps"]["steps"]} == {0, 15}
