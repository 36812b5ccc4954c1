"""How wrong logits must have been for the tokens that MRV2 drew, and for others, as `certify` asks it."""

import dataclasses

from rollout_spec.certify import certify
from rollout_spec.certify.counts import Pair

PROMPT, NUM_TOKENS = [1, *[65, 66] * 6, 67], 24
ENGINE = {
    "max_num_seqs": 8, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
    "max_num_batched_tokens": 128, "skip_tokenizer_init": True,
}  # fmt: skip


def main(model):
    numbers = [0.9], [4], [64], [4], NUM_TOKENS, 0, 1.0, 3
    plan = certify.CertifyPlan(model, [PROMPT], *numbers, "float32", None, ENGINE)
    is_mrv2, runs = certify._run(plan, lambda _: None)
    [(where, pairs)] = runs.items()
    cut = [_differing(pair, place) for pair in pairs for place in (0, len(pair.off.token_ids) // 2, -1)]
    twice = [_Twice(pair.sample, pair.off, pair.on, token) for pair in cut for token in pair.tokens]
    gaps = [one["logit_gap"] for one in certify._differences(plan, {where: twice}, is_mrv2)]
    same = [not pair.differs for pair in pairs]
    return {"is_mrv2": is_mrv2, "same": same, "drawn": gaps[::2], "others": gaps[1::2]}


@dataclasses.dataclass(frozen=True)
class _Twice(Pair):
    """A difference of which both tokens are one."""

    token: int

    @property
    def tokens(self):
        return self.token, self.token


def _differing(pair, place):
    """As if the response with drafts had another token at a place."""
    tokens = pair.off.token_ids.copy()
    tokens[place] = (tokens[place] + 1) % 128
    return Pair(pair.sample, pair.off, dataclasses.replace(pair.off, token_ids=tokens))
