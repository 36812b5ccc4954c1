"""The vocabulary in blocks of 128 tokens: what the keyed race and a fast argmax walk over."""

from __future__ import annotations

import torch

BLOCK_SIZE = 128
# Values that a temporary of logits' size holds at a time, by whole rows or blocks: what fits into a CPU's
# cache; elsewhere as many as make a launch worth its time.
CHUNK_SIZES = {"cpu": 1 << 20}
CHUNK_SIZE = 1 << 24


def split_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the whole blocks, [n, number of whole blocks, BLOCK_SIZE], and of what is behind them."""
    num_rows, num_values = values.shape
    num_whole = num_values // BLOCK_SIZE
    end = num_whole * BLOCK_SIZE
    whole = values if end == num_values else values[:, :end]
    return whole.view(num_rows, num_whole, BLOCK_SIZE), values[:, end:]


def block_peaks(whole: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Each block's largest value, [n, number of blocks]."""
    if not rest.shape[-1]:
        return whole.amax(dim=-1)
    parts = [whole.amax(dim=-1)] if whole.shape[1] else []
    return torch.cat([*parts, rest.amax(dim=-1, keepdim=True)], dim=-1)


def block_sums(whole: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Each block's sum, [n, number of blocks]."""
    sums = whole.sum(dim=-1)
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=-1) if rest.shape[-1] else sums


def block_values(values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block's values a row, [n, BLOCK_SIZE]; -inf beyond the vocabulary."""
    whole, rest = split_blocks(values)
    if not rest.shape[-1]:
        return whole.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK_SIZE)).squeeze(1)
    token_ids = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=values.device)
    last = values.shape[-1] - 1
    return values.gather(-1, token_ids.clamp(max=last)).masked_fill_(token_ids > last, -torch.inf)


def best_token(block: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The best token of one block a row, int64 [n]; `block` is int64 [n, 1]."""
    return torch.add(scores.argmax(dim=-1), block.squeeze(-1), alpha=BLOCK_SIZE)


def argmax(values: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value, int64 [n]; torch's is slow on a CPU for long rows."""
    block = block_peaks(*split_blocks(values)).argmax(dim=-1, keepdim=True)
    return best_token(block, block_values(values, block))


def chunk_size(device: torch.device) -> int:
    """How many values a temporary of logits' size should hold at a time."""
    return CHUNK_SIZES.get(device.type, CHUNK_SIZE)


def rows_at_a_time(device: torch.device, length: int) -> int:
    """Of how many rows of this length memory should hold temporaries at a time."""
    return max(1, chunk_size(device) // length)
