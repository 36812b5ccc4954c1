"""What Triton's kernels for top-k and top-p keep and read; as `interpreted_runner`."""

from collections import Counter

import torch
from triton.runtime import interpreter
from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton

from rollout_spec.vllm.top_k_top_p import cut_rows_alike

CUTS = {"top-k": (20, None), "top-p": (None, 0.95)}
NUM_PROCESSORS = 132  # of an H100


def main(vocab_size="1000"):
    """By the way of cutting, the kind and the number of rows: see `cut`."""
    topk_topp_triton.num_compute_units = lambda *_: NUM_PROCESSORS
    reads = count_reads()
    found = {}
    for way in ("vLLM's", "alike"):
        if way == "alike":
            cut_rows_alike()
        for kind, kept in CUTS.items():
            for num_rows in (1, 7, 8):
                reads.clear()
                found[f"{way}, {kind}, {num_rows}"] = cut(num_rows, int(vocab_size), *kept, reads)
    return found


def count_reads():
    """How many values each program of a kernel reads from now on."""
    builder, reads = type(interpreter.interpreter_builder), Counter()
    load = builder.create_masked_load

    def load_and_count(self, ptrs, mask, *others):
        reads[tuple(self.grid_idx)] += int(mask.data.sum())
        return load(self, ptrs, mask, *others)

    builder.create_masked_load = load_and_count
    return reads


def cut(num_rows, vocab_size, k, p, reads):
    """How many tokens of each row are kept, and whether they are the likeliest, by id where some tie.

    `reads` is of the program that reads most, over the vocabulary; 0 of torch's sort.
    """
    torch.manual_seed(num_rows)
    logits = (3 * torch.randn(num_rows, vocab_size)).bfloat16().float()
    order = logits.sort(descending=True, stable=True).indices
    given = [None if each is None else torch.full((num_rows,), each) for each in (k, p)]
    kept = topk_topp_sampler.apply_top_k_top_p(logits.clone(), *given).isfinite()
    nums = kept.sum(dim=-1).tolist()
    are_first = all(row[first[:num]].all() for row, first, num in zip(kept, order, nums, strict=True))
    return {"kept": nums, "are_first": are_first, "reads": max(reads.values(), default=0) / vocab_size}
