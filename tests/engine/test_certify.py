"""The certificate: the same tokens with drafts and without, and what would not be certified."""

import contextlib
import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

from rollout_spec.certify import certify as vllm_certify
from rollout_spec.cli import main
from rollout_spec.verification import coupled
from tests.engine.conftest import VOCAB_SIZE

SMALL = {
    "skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
}  # fmt: skip


def certified(model, folder, *arguments):
    arguments = ("--model", model, "--num-prompts", "3", "--output", str(folder), *arguments)
    chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    code = main(["certify", *arguments])
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == chosen, "its engines' choice is not for the next"
    return code, json.loads((folder / "certificate.json").read_text())


def test_too_many_tokens_beside_the_longest_prompt_are_refused(chat_model, tmp_path, refused):
    chats = [[{"role": "user", "content": "a" * length}] for length in (9, 4090)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": chats}), tmp_path / "prompts.parquet")
    command = ["certify", "--model", chat_model, "--train-file", str(tmp_path / "prompts.parquet")]
    why = "the model has 4096 positions, and the longest prompt has 4090 tokens"
    assert f"--max-tokens 7: must be at most 6, because {why}" in refused(*command, "--max-tokens", "7")
    broken = tmp_path / "broken"
    shutil.copytree(chat_model, broken)
    (broken / "config.json").write_text("{")
    assert f"{broken}/config.json: Expecting" in refused("certify", "--model", broken)


def test_several_configurations_top_k_and_top_p(chat_model, tmp_path):
    code, record = certified(
        chat_model, tmp_path, "--num-speculative-tokens", "5", "--batch-thresholds", "0", "64",
        "--group-sizes", "2", "4", "--temperatures", "0.8", "0", "0.8", "--top-k", "30", "--top-p", "0.9",
        "--max-tokens", "30",
    )  # fmt: skip
    assert code == 0
    assert len(record["configurations"]) == 8
    # What has drafted nothing is told of, and not counted.
    tested = [c for c in record["configurations"] if c["num_rejected_tokens"]]
    assert {(c["batch_threshold"], c["group_size"]) for c in tested} == {(64, 2), (64, 4)}
    assert record["verdict"].startswith(f"certified in part: {len(tested)} of 8 configurations")
    assert len(record["untested"]) == 8 - len(tested)
    assert record["tokens_compared"] == sum(c["tokens_compared"] for c in tested)
    assert record["tokens_identical"] > 0.99 * record["tokens_compared"] > 450
    assert record["unexplained_differences"] == 0 and record["max_logprob_difference"] < 1e-3
    assert all(difference["logit_gap"] < 1e-4 for difference in record["differences"])
    for one in tested:
        assert one["num_rejected_tokens"] == one["num_draft_tokens"] - one["num_accepted_tokens"]
    plan = {"model": chat_model, "top_k": 30, "top_p": 0.9, "max_tokens": 30, "seed": 0}
    assert record["plan"] | plan == record["plan"]
    assert {"rollout_spec", "torch", "python", "device", "cpu", "date"} <= set(record["environment"])
    page = (tmp_path / "certificate.html").read_text()
    assert f"{record['tokens_identical']:,} of {record['tokens_compared']:,} tokens" in page
    assert record["environment"]["date"] in page and chat_model in page


BFLOAT16 = (
    "--dtype", "bfloat16", "--temperatures", "1", "--batch-thresholds", "64", "--max-tokens", "40",
)  # fmt: skip


def test_bfloat16_is_certified_within_its_own_tolerance(chat_model, tmp_path, capfd):
    code, record = certified(chat_model, tmp_path, *BFLOAT16, "--json")
    shown = capfd.readouterr().out  # after what vLLM says, where a test before has imported it
    assert json.loads(shown[shown.index("{\n") :]) == record
    assert (code, record["unexplained_differences"], record["tolerance"]) == (0, 0, None)
    assert record["plan"]["dtype"] == "bfloat16"
    assert all(difference["tolerance"] > 1e-3 for difference in record["differences"])


def test_a_wrong_sampler_is_not_certified(chat_model, tmp_path, monkeypatch, capfd):
    """Noise of the next row at verified tokens: right in distribution, but other tokens than without.

    Not even within bfloat16's tolerance, the larger one.
    """

    def with_the_next_rows_noise(step, logits):
        return coupled.race(logits, step._noise(logits)[1 : len(step.draft_requests) + 1])

    monkeypatch.setattr(coupled.StepNoise, "sample", with_the_next_rows_noise)
    code, record = certified(chat_model, tmp_path, *BFLOAT16)
    assert (code, record["verdict"]) == (1, "not certified")
    assert record["unexplained_differences"] > 0.5 * len(record["differences"])
    for difference in record["differences"]:
        assert {"position", "logit_gap", "explained"} <= difference.keys()
    shown = capfd.readouterr().out
    assert "not certified" in shown and "First differences" in shown


def test_near_ties_are_explained_and_log_probabilities_compared(tiny_model, monkeypatch):
    """With drafts every logit is wrong by 0.003 at most, as numerics may have it, only more so."""
    engine, compute = vllm_certify.engine, LlamaForCausalLM.compute_logits
    error = 0.003 * torch.sin(torch.arange(VOCAB_SIZE) * 1.7)

    @contextlib.contextmanager
    def engine_with_errors(plan, options, *args, **more):
        with monkeypatch.context() as patch, engine(plan, options, *args, **more) as llm:
            if options is not None:
                patch.setattr(LlamaForCausalLM, "compute_logits", lambda *values: compute(*values) + error)
            yield llm

    monkeypatch.setattr(vllm_certify, "engine", engine_with_errors)
    settings = {
        "temperatures": [1.0], "nums_speculative_tokens": [16], "batch_thresholds": [64], "group_sizes": [16],
        "max_tokens": 120, "top_k": 0, "top_p": 1.0, "seed": 0, "dtype": "float32", "tolerance": 0.01,
    }  # fmt: skip
    prompts = [[5, 6, 7, 8 + i] * 4 for i in range(3)]
    record = vllm_certify.certify(vllm_certify.CertifyPlan(tiny_model, prompts, **settings, engine=SMALL))
    gaps = [difference["logit_gap"] for difference in record["differences"]]
    assert 3 <= len(gaps) < 24, "of 48 responses"
    assert 0 < min(gaps) < max(gaps) < 0.0061
    assert record["unexplained_differences"] == 0
    assert 1e-4 < record["mean_logprob_difference"] < record["max_logprob_difference"] < 0.0061
