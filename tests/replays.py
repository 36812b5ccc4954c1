"""Plain replays, which what follows an engine is compared with."""

from __future__ import annotations

import contextlib

import numpy as np

from rollout_spec import reference
from rollout_spec.config import SpecConfig
from rollout_spec.index import SuffixIndex, index_options
from rollout_spec.replay import IndexProposer, ReplayResult, Rollout, replay_line


def policy(max_spec_factor=1.0, k=8):
    """SuffixDecoding's, as `decoded` takes it: in the group's automaton alone."""
    return SpecConfig(
        mode="suffix_policy",
        max_spec_factor=max_spec_factor,
        min_token_prob=reference.REFERENCE_MIN_TOKEN_PROB,
        num_speculative_tokens=k,
    )


def rollout(texts, prompt=(1, 2)):
    return Rollout(
        "g", None, np.array(prompt, np.int32), [np.array(text, np.int32) for text in texts if len(text)]
    )


def decoded(lines, config):
    """What a plain replay of lines counts, without trees of their own for the responses."""
    result = ReplayResult()
    with contextlib.closing(IndexProposer(config)) as proposer:
        proposer.index.close()
        proposer.index = SuffixIndex(**index_options(config))
        for line in lines:
            replay_line(proposer, line, [], config.num_speculative_tokens, result)
    return result
