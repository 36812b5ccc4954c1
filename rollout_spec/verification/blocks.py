"""Rows of logits in blocks of 128 tokens, so that most of a long row is only read once."""

import torch

BLOCK_SIZE = 128
CHUNK_SIZE = 1 << 22  # values that a temporary of logits' size holds at a time: 16 MiB of float32


def split_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of values, [n, vocab_size]: the whole blocks, [n, vocab_size // BLOCK_SIZE, BLOCK_SIZE], and the
    values after them, [n, vocab_size % BLOCK_SIZE]."""
    num_whole = values.shape[1] // BLOCK_SIZE
    end = num_whole * BLOCK_SIZE
    return values[:, :end].view(len(values), num_whole, BLOCK_SIZE), values[:, end:]


def block_peaks(values: torch.Tensor) -> torch.Tensor:
    """The largest value of each block, [n, number of blocks], of values [n, vocab_size]."""
    whole, rest = split_blocks(values)
    peaks = whole.amax(dim=-1)
    return torch.cat([peaks, rest.amax(dim=-1, keepdim=True)], dim=-1) if rest.shape[1] else peaks


def block_values(values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Of values, [n, vocab_size], those of one block a row, [n, BLOCK_SIZE]; -inf beyond the vocabulary.

    block: the number of each row's block, int64 [n, 1].
    """
    whole, rest = split_blocks(values)
    if not rest.shape[1]:
        return whole.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK_SIZE)).squeeze(1)
    token_ids = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=values.device)
    last = values.shape[1] - 1
    return values.gather(1, token_ids.clamp(max=last)).masked_fill_(token_ids > last, -torch.inf)


def best_token(block: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The token with the best score, of [n, BLOCK_SIZE], in a row's block: int64 [n]. block: int64 [n, 1]."""
    return scores.argmax(dim=-1) + BLOCK_SIZE * block.squeeze(-1)


def argmax(values: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value, int64 [n]; torch's is slow on a CPU for long rows."""
    block = block_peaks(values).argmax(dim=-1, keepdim=True)
    return best_token(block, block_values(values, block))
