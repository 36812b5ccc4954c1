"""A certificate's arithmetic: what is compared, what explains a difference, what the page says."""

import numpy as np
import pytest
import torch

from rollout_spec.certify import counts
from rollout_spec.certify.certify import CertifyPlan
from rollout_spec.certify.counts import Configuration, Pair, Response, Sample, untested, verdict
from rollout_spec.certify.numerics import explain, rounding
from rollout_spec.config import UserError
from rollout_spec.metrics import RequestCounters
from rollout_spec.report.certificate import render_html
from rollout_spec.report.responses import Agreement
from tests.drawn import keyed_sample

VOCAB_SIZE = 128
CONFIGURATION = Configuration(8, 64, 4, 0.6)


def response(token_ids, num_rejected=0):
    counters = RequestCounters(num_drafts=1, num_draft_tokens=3, num_accepted_tokens=3 - num_rejected)
    return Response(token_ids, [0.0] * len(token_ids), counters)


def test_a_configuration_that_rejected_nothing_says_nothing():
    accepted = {"num_draft_tokens": 5, "num_rejected_tokens": 0}
    rejected = {"num_draft_tokens": 5, "num_rejected_tokens": 1}
    nothing = {"num_draft_tokens": 0, "num_rejected_tokens": 0}
    greedy = Configuration(8, 64, 4, 0.0)
    with pytest.raises(UserError, match=r"temperature=0\.6: no draft token .*=0\.0: nothing was drafted"):
        untested({CONFIGURATION: accepted, greedy: nothing}, num_unexplained=0)
    # A verification that accepts all is judged by what it has got wrong.
    assert untested({CONFIGURATION: accepted}, num_unexplained=1).keys() == {CONFIGURATION}
    assert counts.logprob_differences([]) == {"mean_logprob_difference": 0.0, "max_logprob_difference": 0.0}
    # One that says nothing is named, and costs the others nothing.
    found = untested({CONFIGURATION: accepted, greedy: rejected}, num_unexplained=0)
    assert found == {CONFIGURATION: "no draft token was rejected"}


def test_counts_end_at_the_first_difference():
    """Two samples in two configurations; the second differs in its first response."""
    off = response([1, 2, 3, 4])
    same = Pair(Sample(0, 1.0, 1), off, response([1, 2, 3, 4]))
    first = [Pair(Sample(0, 1.0, 0), off, response([1, 2, 3, 4], 2)), same]
    second = [Pair(Sample(0, 1.0, 0), off, response([1, 9, 9], 1)), same]
    shown = ("tokens_compared", "tokens_identical", "num_rejected_tokens")
    assert [counts.of_pairs(first)[name] for name in shown] == [8, 8, 2]
    assert [counts.of_pairs(second)[name] for name in shown] == [2 + 4, 1 + 4, 1]
    together = counts.of_pairs([*first, *second])
    assert [together[name] for name in shown] == [8 + 6, 8 + 5, 2 + 1]
    assert (together["num_drafts"], together["num_draft_tokens"]) == (4, 12)
    assert second[0].tokens == (2, 9) and second[0].differs and not same.differs
    longer = Pair(Sample(0, 1.0, 0), off, response([1, 2, 3, 4, 5]))
    assert (longer.agreement, longer.tokens) == (Agreement(5, 4), (-1, 5))


def test_the_gap_says_how_wrong_the_logits_must_have_been():
    logprobs = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(0)
    order = logprobs.argsort(descending=True).tolist()
    gap = float(logprobs[order[0]] - logprobs[order[1]])
    assert explain(logprobs, 0.0, 0, 1.0, 1, 1, order[:2], 1e-4) == pytest.approx(gap)
    own = int(keyed_sample(logprobs[None] / 0.5, torch.tensor([7]), torch.tensor([3])))
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, own], 1e-4) == 0
    other = next(token for token in order if token != own)
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, other], 1e-4) > 0
    assert explain(logprobs, 0.5, 0, 1.0, 7, 3, [own, -1], 1e-4) == float("inf")


def drawn(logits, kept, position=3):
    masked = torch.full_like(logits, -torch.inf)
    masked[kept] = logits[kept]
    return int(keyed_sample(masked[None], torch.tensor([7]), torch.tensor([position])))


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (0, 0.5), (30, 0.5), (4, 0.99)])
def test_a_boundary_that_was_on_either_side_explains(top_k, top_p):
    """Logits whose boundary is moved to 1e-5 beyond a token, or before it; with either, either draw."""
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
                to_boundary = float(np.log(top_p / (1 - top_p)) - torch.logit(before))
                near[order[: num_kept - 1]] += to_boundary - moved
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


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.1, 0, 1.0), (0.5, 0, 1.0), (0.3, 50, 0.95)])
def test_a_token_that_is_out_of_reach_is_never_explained(temperature, top_k, top_p):
    """Whichever engine drew it, and however much less than float32's smallest number is its probability."""
    for seed in range(8):
        logits = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).mul(3)
        logits[:128] += 15
        logits[640:768] -= 40 + 3 * seed  # a whole block
        own, wrong = drawn(logits / temperature, list(range(1000)), position=seed), 640 + seed
        for token_ids in ([own, wrong], [wrong, own], [wrong]):
            assert explain(logits, temperature, top_k, top_p, 7, seed, token_ids, 1e-4) > 50
    logits[3] = torch.nan
    assert explain(logits, temperature, top_k, top_p, 7, 0, [own, own], 1e-4) == np.inf


def test_what_is_rounded_is_tolerated():
    logits = torch.tensor([3.0, -16.0, -torch.inf])  # of a token that the model never says
    assert rounding("bfloat16", logits, 1.0) == rounding("bfloat16", logits, 0.0) == 2 * 16 * 2**-7
    assert rounding("float16", logits, 0.5) == 2 * 2 * 16 * 2**-10


def certificate(**changes):
    difference = {"prompt": 0, "number": 0, "temperature": 0.0, "position": 5, "explained": True}
    difference |= {"num_speculative_tokens": 8, "batch_threshold": 8, "tolerance": 1e-3}
    return {
        "verdict": "certified",
        "tokens_compared": 9, "tokens_identical": 7,
        "differences": [difference | {"logit_gap": 0.0}, difference | {"logit_gap": None}],
        "unexplained_differences": 0, "tolerance": None, "num_draft_tokens": 4, "num_rejected_tokens": 2,
        "max_logprob_difference": 0.0, "mean_logprob_difference": 0.0, "untested": [],
        "configurations": [],
        "model_runner": "MRV1",
        "plan": {"model": "a <small> one", "dtype": "bfloat16", "engine": {}},
        "environment": {"device": "cpu", "cpu": "a processor", "num_cores": 2, "date": "today", "torch": "2"},
    } | changes  # fmt: skip


def test_the_page_tells_no_gap_from_no_finite_gap_and_names_the_runner():
    page = render_html(certificate())
    assert page.count("<td>0.0e+00</td>") == page.count("<td>inf</td>") == 1
    assert "2 x the epsilon of bfloat16" in page
    for name, value in {"model": "a &lt;small&gt; one", "versions": "torch 2", "date": "today"}.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "All engines here had MRV1" in page
    assert "All engines here had MRV2" in render_html(certificate(model_runner="MRV2"))


def test_the_verdict_says_what_was_not_tested_and_what_differs():
    assert verdict(certificate()) == "certified up to rounding"
    assert verdict(certificate(differences=[])) == "certified"
    assert verdict(certificate(unexplained_differences=1)) == "not certified"
    part = certificate(differences=[], untested=["this one"], configurations=[{}, {}, {}])
    assert verdict(part) == "certified in part: 2 of 3 configurations"
    exact = certificate(differences=[], tolerance=0.0)
    assert verdict(exact) == "certified bit for bit"
    assert "promises the same bits" in render_html(exact)
    assert verdict(exact | {"max_logprob_difference": 1e-7}) == "not certified"
    assert verdict(exact | {"max_logprob_difference": 1e-7, "tolerance": 1e-4}) == "certified"


@pytest.mark.parametrize(("mode", "given", "most"), [("1", None, 0.0), ("1", 0.1, 0.1), ("0", None, 1e-4)])
def test_the_batch_invariant_mode_explains_no_difference(monkeypatch, mode, given, most):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
    assert CertifyPlan("", [], [], [], [], [], 1, 0, 1.0, 0, "float32", given, {}).fixed_tolerance == most
