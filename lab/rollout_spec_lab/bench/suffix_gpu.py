"""`suffix_gpu`, a suffix array on the device that is proposed for vLLM: its drafter, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from suffix_gpu import SuffixGPUDrafter

from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.replay import Proposer
from rollout_spec.trace import Rollout


class SuffixGPU(Proposer):
    """One memory for all lines, which takes in what runs, as the vLLM of its authors feeds it.

    That memory is its history: `start` needs no earlier responses.

    Args:
        k: num_speculative_tokens.
        options: of SuffixGPUDrafter.
    """

    def __init__(self, k: int, **options: Any) -> None:
        self._drafter = SuffixGPUDrafter(k, device="cpu", enable_global=True, **options)
        self._num_requests = 0

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        num_rows = len(line.responses)
        self._first, self._num_prompt_tokens = self._num_requests, len(line.prompt_token_ids)
        self._num_requests += num_rows
        self._levels = np.zeros(num_rows, np.int32)
        self._tokens = torch.empty(0)

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        if not len(self._tokens):
            self._tokens = torch.zeros(token_ids.shape, dtype=torch.int32)
        for row, level in zip(rows.tolist(), levels.tolist(), strict=True):
            known = slice(self._levels[row], level)  # the recording goes on; the drafter must not see it
            self._tokens[row, known] = torch.from_numpy(token_ids[row, known])
            self._levels[row] = level
        self._take_in(rows.tolist(), final=False)
        drafts, numbers = self._drafter.propose(
            torch.from_numpy(np.ascontiguousarray(levels)),
            self._tokens[torch.from_numpy(rows.astype(np.int64))],
            torch.from_numpy(max_draft_tokens > 0),
        )
        return drafts.numpy(), np.minimum(numbers.numpy(), max_draft_tokens)

    def finish(self) -> None:
        self._take_in(range(len(self._levels)), final=True)

    def _take_in(self, rows: Sequence[int], *, final: bool) -> None:
        begin = self._num_prompt_tokens
        self._drafter.ingest_active(
            [self._first + row for row in rows],
            [self._tokens[row, begin:] for row in rows],
            [int(self._levels[row]) - begin for row in rows],
            final,
        )
        self._drafter.poll()
