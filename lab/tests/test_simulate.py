"""`rollout-spec simulate`: rollouts on devices that are not there, and what it refuses."""

import itertools
import json
from pathlib import Path

import pytest

from lab.tests.conftest import DATA
from rollout_spec.cli import main
from rollout_spec.trace import read_trace

TRACE, RECORDING = (str(DATA / f"{name}_trace.jsonl.gz") for name in ("demo", "policy"))
QWEN = str(DATA.parents[1] / "recipes/models/qwen3_32b.json")


@pytest.fixture
def printed(capsys):
    """`printed(*arguments)`: what `simulate` prints of Qwen3-32B on H100; as JSON with `--json`."""

    def run(*arguments):
        capsys.readouterr()
        command = ["simulate", "--model-config", QWEN, "--gpu", "h100", *map(str, arguments)]
        assert main(command) == 0
        said = capsys.readouterr().out
        return json.loads(said)["results"] if "--json" in arguments else said

    return run


def test_policies_with_recurrent_layers_are_simulated_with_few_draft_tokens(tmp_path, capsys, printed):
    fields = json.loads(Path(QWEN).read_text()) | {
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
        "linear_key_head_dim": 128, "full_attention_interval": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    command = [TRACE, "--limit-groups", "1", "--batch-thresholds", "8", "--json", "--tp", "2"]
    command += ["--model-config", str(tmp_path / "config.json")]
    [result] = printed(*command)
    assert [figures["num_speculative_tokens"] for figures in result["runs"]] == [None, 3]
    assert main(["simulate", *command, "--gpu", "h100", "--num-speculative-tokens", "15"]) == 2
    assert "num_speculative_tokens=15: must be at most 7" in capsys.readouterr().err


def test_it_says_whether_a_model_should_draft_too(printed):
    """A head of one layer, where it is often right, and where it is never."""
    options = [RECORDING, "--limit-groups", "6", "--batch-thresholds", "64", "--model-acceptance"]
    best, speedups = [], []
    for acceptance in ("0.7,0.7,0.7", "0,0,0"):
        [result] = printed(*options, acceptance, "--json")
        best.append(result["best_drafter"])
        speedups.append({run["drafter"]: run["speedup"] for run in result["runs"]})
        assert list(speedups[-1]) == ["off", "sam", "model", "sam+model"]
    assert best == ["sam+model", "sam"]
    assert speedups[0]["model"] > 1.1 > speedups[1]["model"]
    shown = printed(*options, "0.7,0.7,0.7")
    assert shown.startswith("The model's drafts and the index's together would make")


def test_it_predicts_for_a_device_that_is_not_there(printed):
    command = [TRACE, "--group-size", 4, "--limit-groups", 2, "--json", "--batch-thresholds"]
    [result] = printed(*command, 8, "auto", "--num-speculative-tokens", 3, 16)
    settings = [(r["batch_threshold"], r["num_speculative_tokens"]) for r in result["runs"]]
    assert settings == [("off", None), (8, 3), (8, 16), ("auto", 3), ("auto", 16)]
    best = max(result["runs"], key=lambda r: r["speedup"])
    chosen = (result["best_threshold"], result["best_num_speculative_tokens"])
    assert chosen == (best["batch_threshold"], best["num_speculative_tokens"])
    assert best["speedup"] > 1.1

    def makespans(*more):
        return [r["makespan_s"] for r in printed(*command, 1, *more)[0]["runs"]]

    plain, drafted = makespans()
    # Twenty times the context costs more than twenty times the steps; the host's time is the drafter's alone.
    texts = [text for line in itertools.islice(read_trace(TRACE), 2) for text in line.responses[:4]]
    longest = max(map(len, texts))
    assert makespans("--longest-response", 20 * longest)[0] > 20.05 * plain
    on_mrv1 = makespans("--runner", "mrv1")
    assert on_mrv1[0] == plain and on_mrv1[1] > 1.02 * drafted
    both = makespans("--copies", 2)
    assert plain < both[0] < 1.5 * plain


EXPERTS = QWEN.replace("32b", "235b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu h100", "--model-config: a prediction needs the policy's config.json"),
        (f"--model-config {QWEN}", "--gpu: must be one of h100, h200, a100, 910b"),
        (f"--model-config {QWEN} --gpu b200", "--gpu b200: must be one of h100, h200, a100"),
        ("--model-config /nowhere.json --gpu h100", "/nowhere.json"),
        (f"--model-config {QWEN} --gpu 910b", "66 GB of weights a device do not fit into 0.9"),
        ("--replicas 32 --dp 16", "--replicas 32 --dp 16: at most 128 ranks"),
        (f"--step-times 1:0.1 --gpu h100 --model-config {QWEN}", "--step-times: with --model-config and"),
        (f"--gpu h100 --model-config {QWEN} --tp 2 --expert-parallel", "--expert-parallel: a dense"),
        (f"--gpu h100 --model-config {QWEN} --longest-response 131072", "an engine holds 24,708 tokens, the"),
        (f"--gpu h100 --model-config {QWEN} --tp 8 --longest-response 1000000000", "holds 1,947,316 tokens"),
        (
            f"--gpu h100 --model-config {EXPERTS} --tp 4 --dp 8 --model-acceptance 0.7",
            "--dp 8: engines refuse",
        ),
        (f"--gpu h100 --model-config {QWEN} --tp 8 --spec model_tokens=1", "but with --model-acceptance"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(options, message, capsys):
    assert main(["simulate", TRACE, *options.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rollout-spec simulate: ") and message in error
