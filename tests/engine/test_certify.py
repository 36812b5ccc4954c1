"""The certificate: identical rollouts of the pretrained policy, and what would not be certified."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch

from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE

TINY = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
WHERE = {"num_speculative_tokens": 8, "batch_threshold": 8, "group_size": 4, "temperature": 0.6}
SMALL = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


def tiny_plan(model: str, **changes: Any) -> Any:
    from rollout_spec.vllm_certify import Plan

    prompts = [[5, 6, 7, 8 + i] * 4 for i in range(3)]
    settings = {
        "temperatures": [1.0], "batch_thresholds": [64], "group_sizes": [4], "max_tokens": 40,
        "engine": TINY | SMALL,
    }  # fmt: skip
    return Plan(model, prompts, **settings | changes)


@pytest.fixture(scope="session")
def chat_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a tokenizer, a token a character, so that the command can run it."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.BPE({chr(i): i for i in range(VOCAB_SIZE)}, []))
    characters.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(tiny_model, path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=chr(EOS_TOKEN_ID))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def test_the_policys_rollouts_are_identical(policy: str, tmp_path: pathlib.Path) -> None:
    """By the command: 2,000 tokens in float32 at three temperatures, every difference explained."""
    from rollout_spec.cli import main

    arguments = ["--num-speculative-tokens", "4", "--group-sizes", "4", "--max-tokens", "80"]
    assert main(["certify", "--model", policy, *arguments, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "certificate.json").read_text())
    page = (tmp_path / "certificate.html").read_text()
    assert f"{record['tokens_identical']:,} of {record['tokens_compared']:,} tokens" in page
    assert record["tokens_compared"] > 2000
    assert record["tokens_identical"] >= 0.99 * record["tokens_compared"]
    assert record["unexplained_differences"] == 0
    assert all(difference["logit_gap"] < 1e-4 for difference in record["differences"])
    assert 0 < record["num_accepted_tokens"] < record["num_draft_tokens"]
    assert record["max_logprob_difference"] < 1e-3
    assert record["accuracy"]["off"] == pytest.approx(record["accuracy"]["on"], abs=0.05)


def test_several_configurations_top_k_top_p_and_the_distribution_test(tiny_model: str) -> None:
    from rollout_spec.vllm_certify import certify

    plan = tiny_plan(
        tiny_model, nums_speculative_tokens=[2, 5], batch_thresholds=["auto", 64], temperatures=[0.8, 0.0],
        top_k=30, top_p=0.9, distribution_samples=400,
    )  # fmt: skip
    record = certify(plan)
    assert len(record["configurations"]) == 4
    tested = [c for c in record["configurations"] if c["num_accepted_tokens"] < c["num_draft_tokens"]]
    assert record["tokens_compared"] == sum(c["tokens_compared"] for c in tested)
    assert record["tokens_identical"] > 0.99 * record["tokens_compared"] > 3000
    assert record["unexplained_differences"] == 0
    distribution = record["distribution"]
    assert distribution["passed"] and distribution["num_tests"] == 3
    assert 0 < distribution["num_accepted_tokens"] < distribution["num_draft_tokens"]


def test_a_wrong_sampler_is_not_certified(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the next position at verified tokens: right in distribution, but other tokens than without."""
    from rollout_spec import keyed
    from rollout_spec.cli.certify import passed
    from rollout_spec.vllm_certify import certify

    def of_the_next_position(step: keyed.KeyedStep, logits: torch.Tensor) -> torch.Tensor:
        keys, positions = step._keys[: step.num_tokens], step._positions[: step.num_tokens]
        return keyed.keyed_sample(logits, keys, positions + 1)

    monkeypatch.setattr(keyed.KeyedStep, "sample", of_the_next_position)
    record = certify(tiny_plan(tiny_model))
    assert record["unexplained_differences"] > 0
    assert not passed(record)


def test_a_wrong_distribution_is_not_certified(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard verification that takes the draft where it should recover: right tokens, wrong frequencies."""
    from rollout_spec import verify
    from rollout_spec.cli.certify import passed
    from rollout_spec.vllm_certify import certify

    monkeypatch.setattr(verify, "_own_tokens", lambda *args: args[3].int())
    record = certify(tiny_plan(tiny_model, temperatures=[0.8], distribution_samples=400))
    assert record["unexplained_differences"] == 0
    assert not record["distribution"]["passed"]
    assert not passed(record)


def test_nothing_to_certify_is_exit_code_2(chat_model: str, capfd: Any) -> None:
    from rollout_spec.cli import main

    arguments = ["--num-prompts", "1", "--batch-thresholds", "0", "--max-tokens", "8"]
    assert main(["certify", "--model", chat_model, *arguments, "--distribution-samples", "0"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    for temperature in ("1.0", "0.6", "0.0"):
        assert f"batch_threshold=0, group_size=4, temperature={temperature}: nothing was drafted" in error


def test_a_distribution_test_without_a_test_is_refused(tiny_model: str) -> None:
    from rollout_spec.vllm_certify import CertifyError, certify

    with pytest.raises(CertifyError, match="distribution_samples=12: too few, or at temperature 0"):
        certify(tiny_plan(tiny_model, distribution_samples=12))


def test_a_configuration_that_rejected_nothing_says_nothing() -> None:
    from rollout_spec.vllm_certify import CertifyError, is_tested, refuse_if_untested, untested

    accepted = WHERE | {"num_draft_tokens": 5, "num_rejected_tokens": 0}
    rejected = WHERE | {"num_draft_tokens": 5, "num_rejected_tokens": 1}
    with pytest.raises(CertifyError, match="temperature=0[.]6: no draft token was rejected"):
        refuse_if_untested([accepted])
    # One that says nothing is told of, and costs the others nothing.
    refuse_if_untested([accepted, rejected])
    assert [is_tested(one) for one in (accepted, rejected)] == [False, True]
    [reason] = untested([accepted, rejected])
    assert "no draft token was rejected" in reason


def test_the_gap_says_how_wrong_the_logits_must_have_been() -> None:
    from rollout_spec.keyed import keyed_sample
    from rollout_spec.vllm_certify import explain

    logprobs = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(0)
    order = logprobs.argsort(descending=True).tolist()
    assert explain(logprobs, 0.0, 0, 1.0, 1, 1, order[:2]) == pytest.approx(
        float(logprobs[order[0]] - logprobs[order[1]])
    )
    own = int(keyed_sample(logprobs[None] / 0.5, torch.tensor([7]), torch.tensor([3])))
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, own]) == 0
    other = next(token for token in order if token != own)
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, other]) > 0
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, -1]) == float("inf")
    # The fifth token with top_k=4: its logit's distance to the fourth, at this temperature.
    inside = int(
        keyed_sample(
            torch.where(logprobs >= logprobs[order[3]], logprobs, -torch.inf)[None] / 0.5,
            torch.tensor([7]),
            torch.tensor([3]),
        )
    )
    distance = float(logprobs[order[3]] - logprobs[order[4]]) / 0.5
    assert explain(logprobs, 0.5, 4, 1.0, 7, 3, [inside, order[4]]) == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--num-speculative-tokens", "65"],
            "rollout.spec.num_speculative_tokens=65: must be between 1 and 64",
        ),
        (["--group-sizes", "0"], "--group-sizes 0: must be at least 1"),
        (["--temperatures", "-1"], "--temperatures -1.0: must be at least 0"),
        (["--model", "nowhere"], "--model nowhere: no Hugging Face folder"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, capsys: Any) -> None:
    from rollout_spec.cli import main

    assert main(["certify", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
