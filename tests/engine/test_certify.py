"""The certificate: identical rollouts of the pretrained policy, and what would not be certified."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from tests.engine.conftest import VOCAB_SIZE

TINY = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
WHERE = {"num_speculative_tokens": 8, "batch_threshold": 8, "group_size": 4}
SMALL = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


def tiny_plan(model: str, **changes: Any) -> Any:
    from rollout_spec.vllm_certify import Plan

    prompts = [[5, 6, 7, 8 + i] * 4 for i in range(3)]
    settings = {
        "temperatures": [1.0], "batch_thresholds": [64], "group_sizes": [4], "max_tokens": 40,
        "engine": TINY | SMALL,
    }  # fmt: skip
    return Plan(model, prompts, **settings | changes)


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


def test_the_exit_code_is_the_verdict(policy: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """1: not certified; 2: nothing to certify. What `certify` finds is the subject of the other tests."""
    from rollout_spec import vllm_certify
    from rollout_spec.cli import main

    difference = {
        "prompt": 0, "temperature": 1.0, "number": 3, "num_speculative_tokens": 8, "batch_threshold": 8,
        "group_size": 4, "position": 17, "token_id_off": 5, "token_id_on": 6, "logit_gap": float("inf"),
        "explained": False,
    }  # fmt: skip
    configuration = WHERE | {
        "tokens_compared": 20, "tokens_identical": 19, "num_draft_tokens": 4, "num_accepted_tokens": 2,
        "tokens_per_step": 1.2,
    }  # fmt: skip
    found = {
        "dtype": "float32", "temperatures": [1.0], "top_k": 0, "top_p": 1.0, "tokens_compared": 20,
        "tokens_identical": 19, "num_draft_tokens": 4, "num_accepted_tokens": 2, "differences": [difference],
        "unexplained_differences": 1, "tolerance": 1e-4, "mean_logprob_difference": 0.0,
        "max_logprob_difference": 0.0, "configurations": [configuration], "untested": [],
        "distribution": None,
        "texts": {"off": [""], "on": [""]}, "prompt_of_text": [0],
    }  # fmt: skip
    monkeypatch.setattr(vllm_certify, "certify", lambda plan: dict(found))
    assert main(["certify", "--model", policy]) == 1
    shown = capsys.readouterr().out
    assert "not certified" in shown and "first differences" in shown and "17" in shown
    monkeypatch.setattr(vllm_certify, "certify", lambda plan: found | {"unexplained_differences": 0})
    assert main(["certify", "--model", policy, "--json"]) == 0

    def refuse(plan: Any) -> None:
        vllm_certify.refuse_if_untested([WHERE | {"num_draft_tokens": 0, "num_accepted_tokens": 0}])

    monkeypatch.setattr(vllm_certify, "certify", refuse)
    assert main(["certify", "--model", policy]) == 2
    assert "there is nothing to certify" in capsys.readouterr().err


def test_a_distribution_test_without_a_test_is_refused(tiny_model: str) -> None:
    from rollout_spec.vllm_certify import CertifyError, certify

    with pytest.raises(CertifyError, match="distribution_samples=12: too few, or at temperature 0"):
        certify(tiny_plan(tiny_model, distribution_samples=12))


def test_nothing_to_certify_is_refused(tiny_model: str) -> None:
    from rollout_spec.vllm_certify import CertifyError, certify

    with pytest.raises(CertifyError, match="batch_threshold=0, group_size=4: nothing was drafted"):
        certify(tiny_plan(tiny_model, batch_thresholds=[0]))


def test_a_run_that_rejected_nothing_is_refused() -> None:
    from rollout_spec.vllm_certify import CertifyError, is_tested, refuse_if_untested, untested

    accepted = WHERE | {"num_draft_tokens": 5, "num_accepted_tokens": 5}
    rejected = WHERE | {"num_draft_tokens": 5, "num_accepted_tokens": 4}
    with pytest.raises(CertifyError, match="group_size=4: no draft token was rejected"):
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
