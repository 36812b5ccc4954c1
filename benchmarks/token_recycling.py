"""Would Token Recycling (arXiv 2408.08696) add to `sam`? A table of successors from the target's logits.

    python benchmarks/token_recycling.py rollouts-*.jsonl --model .cache/models/smollm2-float32 --output FILE

The traces are rollouts of that model (`rollout-spec bench engine --output DIR` writes them). Their logits
are computed again; each verified position stores its likeliest successor under its token, with the
probability that the target gave it. What such a probability is worth in another context is learned online.
Where `sam` drafts nothing (`none`), or also where the table's first token is likelier than sam's
(`likelier`) or the match is shorter than SHORT_MATCH (`short`, SAM-Decoding's rule), a chain of successors is
drafted instead, as far as its probability stays above the price. Every rule is replayed at every price, so
that tokens per step can be compared at equal draft tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rollout_spec.config import SpecConfig
from rollout_spec.history import Response
from rollout_spec.native import Int32Array
from rollout_spec.replay import IndexProposer, ReplayResult, Rollout, read_trace, replay_line

PRICES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
RULES = ("sam", "none", "likelier", "short", "table")  # table: nothing but the table
SHORT_MATCH = 5  # tokens; the threshold of SAM-Decoding (arXiv 2411.10666)
GRID = np.arange(1.25, 3.3, 0.25)  # draft tokens per step at which the rules are compared

# Of each position of a line's rows: the likeliest next token, and its probability. [n, L]
_Successors = tuple[Int32Array, np.ndarray]


class Recycler:
    """`sam` and, by `rule`, a table of successors that the replayed steps fill as an engine would."""

    def __init__(self, rule: str, price: float, vocab_size: int) -> None:
        self._rule, self._price = rule, price
        self._sam = IndexProposer(SpecConfig(min_token_prob=price))
        self._next = np.full(vocab_size, -1, np.int32)
        self._probability = np.zeros(vocab_size)
        # How often the table was right, by tenths of the probability it told: right ones, all.
        self._hits, self._trials = np.full(11, 0.5), np.ones(11)
        self.successors: _Successors

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Response]) -> None:
        self._sam.start(prompt, num_rows, earlier)
        self._levels = np.zeros(num_rows, np.int32)

    def step(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        for row, level in zip(rows.tolist(), levels.tolist(), strict=True):
            # The newest token is not verified yet: no logits follow it.
            seen = slice(self._levels[row], level - 1)
            self._learn(token_ids[row, self._levels[row] : level])
            self._next[token_ids[row, seen]] = self.successors[0][row, seen]
            self._probability[token_ids[row, seen]] = self.successors[1][row, seen]
            self._levels[row] = level - 1
        index, sequences = self._sam.index, self._sam._sequences[rows]
        result = index.step(sequences, token_ids, rows, levels, budgets)
        drafts, numbers = result.draft_tokens.copy(), result.num_draft_tokens.copy()
        if self._rule == "table":
            numbers[:] = 0
        for i in np.flatnonzero(budgets) if self._rule != "sam" else ():
            chain, first = self._chain(int(token_ids[rows[i], levels[i] - 1]), int(budgets[i]))
            likelier = self._rule == "likelier" and numbers[i] and first > result.survivals[i, 0]
            short = self._rule == "short" and result.match_lens[i] < SHORT_MATCH
            if chain and (numbers[i] == 0 or likelier or short):
                drafts[i, : len(chain)], numbers[i] = chain, len(chain)
        return drafts, numbers

    def _learn(self, text: Int32Array) -> None:
        tenths = np.rint(10 * self._probability[text[:-1]]).astype(int)
        is_known = self._next[text[:-1]] >= 0
        np.add.at(self._trials, tenths[is_known], 1.0)
        np.add.at(self._hits, tenths[is_known], (self._next[text[:-1]] == text[1:])[is_known])

    def _chain(self, token: int, most: int) -> tuple[list[int], float]:
        """The draft, and the probability of its first token."""
        chain: list[int] = []
        survival, first = 1.0, 0.0
        while len(chain) < most and self._next[token] >= 0:
            tenth = round(10 * self._probability[token])
            survival *= self._hits[tenth] / self._trials[tenth]
            first = first or survival
            if survival < self._price:
                break
            token = int(self._next[token])
            chain.append(token)
        return chain, first

    def finish(self) -> None:
        self._sam.finish()


@torch.inference_mode()
def successors(model: Any, line: Rollout, temperature: float) -> _Successors:
    prompt = line.prompt_token_ids
    width = len(prompt) + max(map(len, line.responses))
    tokens, probabilities = (
        np.zeros((len(line.responses), width), np.int32),
        np.zeros((len(line.responses), width)),
    )
    for row, response in enumerate(line.responses):
        text = np.concatenate([prompt, response])
        logits = model(torch.from_numpy(text)[None].long()).logits[0]
        best = (logits / temperature).softmax(-1).max(-1)
        tokens[row, : len(text)] = best.indices.numpy()
        probabilities[row, : len(text)] = best.values.numpy()
    return tokens, probabilities


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--temperature", type=float, default=0.7, help="of the rollouts")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    lines = [line for trace in args.traces for line in read_trace(trace)]
    tables = [successors(model, line, args.temperature) for line in tqdm(lines, "logits")]
    results = []
    for rule, price in tqdm(list(itertools.product(RULES, PRICES)), "replays"):
        proposer, result = Recycler(rule, price, model.config.vocab_size), ReplayResult()
        for line, table in zip(lines, tables, strict=True):
            proposer.successors = table
            replay_line(proposer, line, (), 8, result)
        results.append({"rule": rule, "price": price} | result.to_dict())
    at_equal_drafts = {rule: _interpolated([r for r in results if r["rule"] == rule]) for rule in RULES}
    record = {"results": results, "draft_tokens_per_step": GRID.tolist(), "tokens_per_step": at_equal_drafts}
    args.output.write_text(json.dumps(record, indent=2) + "\n")
    print("draft tokens per step", *GRID)
    for rule, values in at_equal_drafts.items():
        print(f"{rule:>21}", *("   –" if value is None else f"{value:.3f}" for value in values))


def _interpolated(results: list[dict[str, Any]]) -> list[float | None]:
    points = sorted((r["draft_tokens_per_step"], r["tokens_per_step"]) for r in results)
    at, values = np.array(points).T
    return [float(np.interp(x, at, values)) if at[0] <= x <= at[-1] else None for x in GRID]


if __name__ == "__main__":
    main()
