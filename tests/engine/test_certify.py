"""The certificate: identical rollouts of the pretrained policy, and what would not be certified."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
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
    arguments += ["--distribution-samples", "0", "--output", str(tmp_path)]
    assert main(["certify", "--model", policy, *arguments]) == 0
    record = json.loads((tmp_path / "certificate.json").read_text())
    page = (tmp_path / "certificate.html").read_text()
    assert f"{record['tokens_identical']:,} of {record['tokens_compared']:,} tokens" in page
    assert "its distribution was not tested (0 samples)" in page
    assert record["tokens_compared"] > 2000
    assert record["tokens_identical"] >= 0.99 * record["tokens_compared"]
    assert record["unexplained_differences"] == 0
    assert all(difference["logit_gap"] < 1e-4 for difference in record["differences"])
    assert [one["temperature"] for one in record["temperatures"]] == [1.0, 0.6, 0.0]
    for one in record["temperatures"]:
        assert 0 < one["num_rejected_tokens"] == one["num_draft_tokens"] - one["num_accepted_tokens"]
        assert one["reference_tokens"] == one["tokens_compared"] > 500  # there is one configuration
    for name in ("tokens_compared", "num_drafts", "num_rejected_tokens"):
        assert record[name] == sum(one[name] for one in record["temperatures"])
    assert record["max_logprob_difference"] < 1e-3
    for name in ("correct", "score"):
        assert record["accuracy"]["off"][name] == pytest.approx(record["accuracy"]["on"][name], abs=0.05)
    assert record["plan"] | {"model": policy, "max_tokens": 80, "seed": 0} == record["plan"]
    assert {"rollout_spec", "torch", "python", "device", "cpu", "date"} <= set(record["environment"])
    assert record["environment"]["date"] in page and policy in page


def certified(model: str, folder: pathlib.Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """What the command finds of three prompts: the exit code and the record."""
    from rollout_spec.cli import main

    arguments = ("--model", model, "--num-prompts", "3", "--output", str(folder), *arguments)
    return main(["certify", *arguments]), json.loads((folder / "certificate.json").read_text())


def test_several_configurations_top_k_top_p_and_the_distribution_test(
    chat_model: str, tmp_path: pathlib.Path
) -> None:
    code, record = certified(
        chat_model, tmp_path, "--num-speculative-tokens", "2", "5", "--batch-thresholds", "0", "64",
        "--group-sizes", "2", "4", "--temperatures", "0.8", "0", "0.8", "--top-k", "30", "--top-p", "0.9",
        "--max-tokens", "30", "--distribution-samples", "400",
    )  # fmt: skip
    assert code == 0
    assert len(record["configurations"]) == 16
    # What has drafted nothing is told of, and not counted.
    tested = [c for c in record["configurations"] if c["num_rejected_tokens"]]
    assert {(c["batch_threshold"], c["group_size"]) for c in tested} == {(64, 2), (64, 4)}
    assert record["verdict"].startswith(f"certified in part: {len(tested)} of 16 configurations")
    assert len(record["untested"]) == 16 - len(tested)
    assert record["tokens_compared"] == sum(c["tokens_compared"] for c in tested)
    assert record["tokens_compared"] > 2 * record["reference_tokens"]  # in 2 + 1 of 4 configurations each
    assert record["tokens_identical"] > 0.99 * record["tokens_compared"] > 900
    assert record["unexplained_differences"] == 0
    assert (record["plan"]["top_k"], record["plan"]["top_p"]) == (30, 0.9)
    distribution = record["distribution"]
    assert distribution["passed"] and distribution["num_tests"] == 3
    assert 0 < distribution["num_accepted_tokens"] < distribution["num_draft_tokens"]


BFLOAT16 = (
    "--dtype", "bfloat16", "--temperatures", "1", "--batch-thresholds", "64", "--max-tokens", "40",
    "--distribution-samples", "0",
)  # fmt: skip


def test_bfloat16_is_certified_within_its_own_tolerance(
    chat_model: str, tmp_path: pathlib.Path, capfd: Any
) -> None:
    code, record = certified(chat_model, tmp_path, *BFLOAT16, "--json")
    assert json.loads(capfd.readouterr().out) == record
    assert (code, record["unexplained_differences"], record["tolerance"]) == (0, 0, None)
    assert record["plan"]["dtype"] == "bfloat16"
    assert all(difference["tolerance"] > 1e-3 for difference in record["differences"])


def test_a_wrong_sampler_is_not_certified(
    chat_model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Noise of the next row at verified tokens: right in distribution, but other tokens than without.

    Not even within bfloat16's tolerance, the larger one.
    """
    from rollout_spec import keyed

    def with_the_next_rows_noise(step: keyed.KeyedStep, logits: torch.Tensor) -> torch.Tensor:
        return keyed._keyed_race(logits, step._noise(logits)[1 : step.num_tokens + 1])

    monkeypatch.setattr(keyed.KeyedStep, "sample", with_the_next_rows_noise)
    code, record = certified(chat_model, tmp_path, *BFLOAT16)
    assert (code, record["verdict"]) == (1, "not certified")
    assert record["unexplained_differences"] > 0.5 * len(record["differences"])
    for difference in record["differences"]:
        assert {"position", "logit_gap", "explained"} <= difference.keys()
    shown = capfd.readouterr().out
    assert "not certified" in shown and "First differences" in shown


def test_near_ties_are_explained_and_log_probabilities_compared(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts every logit is wrong by 0.003 at most, as numerics may have it, only more so."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    from rollout_spec import vllm_certify

    engine, compute_logits = vllm_certify.engine, LlamaForCausalLM.compute_logits
    error = 0.003 * torch.sin(torch.arange(VOCAB_SIZE) * 1.7)

    @contextlib.contextmanager
    def engine_with_errors(plan: Any, options: Any, *args: Any, **more: Any) -> Iterator[Any]:
        with monkeypatch.context() as patch, engine(plan, options, *args, **more) as llm:
            if options is not None:
                patch.setattr(
                    LlamaForCausalLM, "compute_logits", lambda *values: compute_logits(*values) + error
                )
            yield llm

    monkeypatch.setattr(vllm_certify, "engine", engine_with_errors)
    plan = tiny_plan(tiny_model, group_sizes=[16], max_tokens=120, tolerance=0.01)
    record = vllm_certify.certify(plan)
    gaps = [difference["logit_gap"] for difference in record["differences"]]
    assert 3 <= len(gaps) < 24, "of 48 responses"
    assert 0 < min(gaps) < max(gaps) < 0.0061
    assert record["unexplained_differences"] == 0
    assert 1e-4 < record["mean_logprob_difference"] < record["max_logprob_difference"] < 0.0061
    record = vllm_certify.certify(dataclasses.replace(plan, tolerance=1e-4))
    assert record["unexplained_differences"] == sum(gap >= 1e-4 for gap in gaps) > 0


def test_a_wrong_distribution_is_not_certified(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard verification that takes the draft where it should recover: right tokens, wrong frequencies."""
    from rollout_spec import verify
    from rollout_spec.cli.certify import passed
    from rollout_spec.vllm_certify import certify

    monkeypatch.setattr(verify, "_recovered", lambda requests, rows, *args: args[2][rows])
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

    with pytest.raises(CertifyError, match="distribution_samples=12: too few, or hardly random"):
        certify(tiny_plan(tiny_model, distribution_samples=12))


def test_a_configuration_that_rejected_nothing_says_nothing() -> None:
    from rollout_spec.vllm_certify import CertifyError, is_tested, refuse_if_untested, untested

    accepted = WHERE | {"num_draft_tokens": 5, "num_rejected_tokens": 0}
    rejected = WHERE | {"num_draft_tokens": 5, "num_rejected_tokens": 1}
    with pytest.raises(CertifyError, match=r"temperature=0\.6: no draft token was rejected"):
        refuse_if_untested([accepted])
    # One that says nothing is told of, and costs the others nothing.
    refuse_if_untested([accepted, rejected])
    assert [is_tested(one) for one in (accepted, rejected)] == [False, True]
    [reason] = untested([accepted, rejected])
    assert "no draft token was rejected" in reason


def test_counts_are_by_temperature_and_of_what_was_tested() -> None:
    """Two samples each; the second configuration differs once, and rejects at one temperature only."""
    from rollout_spec.metrics import RequestCounters
    from rollout_spec.vllm_certify import Plan, Response, Sample, _counts, _totals, is_tested

    def response(token_ids: list[int], num_rejected: int) -> Response:
        counters = RequestCounters(num_drafts=1, num_draft_tokens=3, num_accepted_tokens=3 - num_rejected)
        return Response(token_ids, [0.0] * len(token_ids), "", counters)

    plan = Plan("", [], temperatures=[1.0, 0.0])
    off = {Sample(0, t, number): response([1, 2, 3, 4], 0) for t in (1.0, 0.0) for number in (0, 1)}
    runs = []
    for first, rejected in (([1, 2, 3, 4], {1.0: 2, 0.0: 1}), ([1, 9, 9], {1.0: 1, 0.0: 0})):
        for t in plan.temperatures:
            on = {Sample(0, t, 0): response(first, rejected[t]), Sample(0, t, 1): response([1, 2, 3, 4], 0)}
            runs.append(({"temperature": t}, on))
    configurations = [where | _counts(off, on) for where, on in runs]
    assert [is_tested(entry) for entry in configurations] == [True, True, True, False]
    pairs = [pair for _, on in runs[:3] for pair in on.items()]
    total = _totals(plan, off, configurations, pairs)
    warm, cold = total["temperatures"]
    shown = ("temperature", "reference_tokens", "tokens_compared", "tokens_identical", "num_rejected_tokens")
    assert [warm[name] for name in shown] == [1.0, 8, 8 + 6, 8 + 5, 2 + 1]
    assert [cold[name] for name in shown] == [0.0, 8, 8, 8, 1]
    assert [total[name] for name in shown[1:]] == [16, 22, 21, 4]
    assert (total["num_drafts"], total["num_draft_tokens"], total["num_accepted_tokens"]) == (6, 18, 14)
    # What is reached in one configuration only is not reached further in another.
    assert _totals(plan, off, configurations[2:3], list(runs[2][1].items()))["reference_tokens"] == 2 + 4


def test_the_gap_says_how_wrong_the_logits_must_have_been() -> None:
    from functools import partial

    from rollout_spec import certify_numerics
    from rollout_spec.keyed import keyed_sample

    explain = partial(certify_numerics.explain, tolerance=1e-4)

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


def drawn(logits: torch.Tensor, kept: list[int], position: int = 3) -> int:
    """What is drawn of these tokens, with the noise of key 7."""
    from rollout_spec.keyed import keyed_sample

    masked = torch.full_like(logits, -torch.inf)
    masked[kept] = logits[kept]
    return int(keyed_sample(masked[None], torch.tensor([7]), torch.tensor([position])))


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.5), (30, 0.5), (4, 0.99)])
def test_a_boundary_that_was_on_either_side_explains(top_k: int, top_p: float) -> None:
    """Logits whose boundary is moved to 1e-5 beyond a token, or before it; with either, either draw."""
    from rollout_spec.certify_numerics import explain

    checked = 0
    for seed in range(40):
        logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).mul(2)
        order = logits.argsort(descending=True).tolist()
        ahead = logits.double().softmax(0)[order].cumsum(0)
        if top_k == 30 and top_p == 0.5:  # top-p is of what top-k leaves
            ahead = ahead / ahead[29]
        num_kept = top_k if top_k == 4 else int((ahead < top_p).sum()) + 1
        if num_kept == 1:
            continue  # the first token is never left out
        for moved in (1e-5, -1e-5):
            near = logits.clone()
            if top_k == 4:  # the fourth and the fifth token, so close
                near[order[4]] = near[order[3]] - moved
                inside, outside = (order[:4], [*order[:3], order[4]])[:: 1 if moved > 0 else -1]
            else:  # those before the last one have as much less than top_p, or more
                before = ahead[num_kept - 2]
                near[order[: num_kept - 1]] += (
                    float(np.log(top_p / (1 - top_p)) - torch.logit(before)) - moved
                )
                inside, outside = (order[:num_kept], order[: num_kept - 1])[:: 1 if moved > 0 else -1]
            one, other = drawn(near, inside), drawn(near, outside)
            assert explain(near, 1.0, top_k, top_p, 7, 3, [one, one], 1e-4) == 0
            if one == other:
                continue
            checked += 1
            assert 0 < explain(near, 1.0, top_k, top_p, 7, 3, [one, other], 1e-4) < 3e-5
            wrong = next(token for token in order if token not in (one, other))
            assert explain(near, 1.0, top_k, top_p, 7, 3, [one, wrong], 1e-4) > 1e-4
    assert checked > 5


def test_a_token_beyond_a_boundary_is_explained_if_it_would_have_been_drawn() -> None:
    from rollout_spec.certify_numerics import explain

    explained = []
    for seed in range(40):
        logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).mul(2)
        order = logits.argsort(descending=True).tolist()
        own = drawn(logits, order[:4])
        for token in order[4:20]:
            gap = explain(logits, 1.0, 4, 1.0, 7, 3, [own, token], 1e-4)
            assert gap > 0.9999 * float(logits[order[3]] - logits[token])
        logits[order[4]] = logits[order[3]] - 1e-5  # as close as can be; others may still be ahead of it
        wins = drawn(logits, order[:5]) == order[4] or drawn(logits, [*order[:3], order[4]]) == order[4]
        explained.append(explain(logits, 1.0, 4, 1.0, 7, 3, [own, order[4]], 1e-4) < 1e-4)
        assert explained[-1] == wins
    assert 3 < sum(explained) < 37


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.1, 0, 1.0), (0.5, 0, 1.0), (0.3, 50, 0.95)])
def test_a_token_that_is_out_of_reach_is_never_explained(
    temperature: float, top_k: int, top_p: float
) -> None:
    """Whichever engine drew it, and however much less than float32's smallest number is its probability."""
    from rollout_spec.certify_numerics import explain

    for seed in range(20):
        logits = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).mul(3)
        logits[:128] += 15
        logits[640:768] -= 40 + 3 * seed  # a whole block
        own, wrong = drawn(logits / temperature, list(range(1000)), position=seed), 640 + seed
        for token_ids in ([own, wrong], [wrong, own], [wrong]):
            assert explain(logits, temperature, top_k, top_p, 7, seed, token_ids, 1e-4) > 50
    logits[3] = torch.nan
    assert explain(logits, temperature, top_k, top_p, 7, 0, [own, own], 1e-4) == np.inf


def test_logits_of_few_bits_are_explained() -> None:
    """Ties at the boundary, distances that are multiples of 1 / 32, pairs that change places."""
    from rollout_spec.certify_numerics import explain

    rng = torch.Generator().manual_seed(0)
    explained = []
    for position in range(900):
        logits = (torch.randn(VOCAB_SIZE, generator=rng) * 2 * 32).round() / 32
        wrong = logits + torch.randint(-1, 2, logits.shape, generator=rng) / 32
        tolerance = 3 / 32  # any two are wrong by 2 / 32 at most
        tokens = []
        for given in (logits, wrong):
            fourth = given.topk(4).values[-1]
            tokens.append(drawn(given, (given >= fourth).nonzero().flatten().tolist(), position))
        if tokens[0] != tokens[1]:
            explained.append(explain(logits, 1.0, 4, 1.0, 7, position, tokens, tolerance) < tolerance)
    assert len(explained) > 10
    assert all(explained)


def test_the_tolerance_is_the_plans_or_the_dtypes() -> None:
    from rollout_spec.vllm_certify import Plan, tolerance

    logits = torch.tensor([3.0, -16.0, 0.5])
    of = lambda temperature, **plan: tolerance(Plan("", [], **plan), logits, temperature)  # noqa: E731
    assert of(1.0) == of(0.25) == 1e-4
    logits[2] = -torch.inf  # a token that the model never says
    assert of(1.0, dtype="bfloat16") == of(0.0, dtype="bfloat16") == 2 * 16 * 2**-7
    assert of(0.5, dtype="float16") == 2 * 2 * 16 * 2**-10
    assert of(0.5, dtype="bfloat16", tolerance=0.01) == of(1.0, tolerance=0.01) == 0.01


def test_the_chi_square_test_is_scipys() -> None:
    from scipy.stats import chi2_contingency  # type: ignore[import-untyped]

    from rollout_spec.certify_numerics import _chi_square

    for rows in ([[300, 500], [450, 350]], [[30, 50, 20], [45, 40, 15]], [[90, 20, 7, 3], [60, 30, 20, 10]]):
        table = np.array(rows)
        expected = chi2_contingency(table, correction=False).pvalue
        assert _chi_square(table) == pytest.approx(expected, rel=1e-9)


def test_what_a_thousand_samples_find() -> None:
    """A temperature 30 % off, not one 10 % off; of Zipf's law here, DESIGN.md has the demo's policy."""
    from rollout_spec.certify_numerics import FALSE_ALARM_RATE, p_values
    from rollout_spec.vllm_certify import DISTRIBUTION_TOKENS

    rng, logits = np.random.default_rng(0), -np.log(np.arange(1, 201))

    def draw(temperature: float) -> list[list[int]]:
        probabilities = np.exp(logits / temperature)
        probabilities /= probabilities.sum()
        return rng.choice(200, (1000, DISTRIBUTION_TOKENS), p=probabilities).tolist()

    def found(temperature: float) -> int:
        runs = [p_values(draw(1.0), draw(temperature)) for _ in range(20)]
        return sum(min(values) <= FALSE_ALARM_RATE / len(values) for values in runs)

    assert found(1.0) == 0
    assert found(1.3) == found(0.75) == 20
    assert found(1.1) < 5


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
