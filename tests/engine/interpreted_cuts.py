"""What Triton's kernels for top-k and top-p keep; as `interpreted_runner`."""

import torch
from vllm.v1.sample.ops import topk_topp_sampler

from rollout_spec.vllm.both_runners.top_k_top_p import cut_rows_alike

CUTS = {"top-k": (20, None), "top-p": (None, 0.95)}
VOCAB_SIZE = 1000


def main():
    cut_rows_alike()
    return {f"{kind}, {num}": cut(num, *kept) for kind, kept in CUTS.items() for num in (1, 7, 8)}


def cut(num_rows, k, p):
    """How many tokens of each row are kept, and whether they are the likeliest, by id where some tie."""
    torch.manual_seed(num_rows)
    logits = (3 * torch.randn(num_rows, VOCAB_SIZE)).bfloat16().float()
    order = logits.sort(descending=True, stable=True).indices
    given = [None if each is None else torch.full((num_rows,), each) for each in (k, p)]
    kept = topk_topp_sampler.apply_top_k_top_p(logits.clone(), *given).isfinite()
    nums = kept.sum(dim=-1).tolist()
    are_first = all(row[first[:num]].all() for row, first, num in zip(kept, order, nums, strict=True))
    return {"kept": nums, "are_first": are_first}
