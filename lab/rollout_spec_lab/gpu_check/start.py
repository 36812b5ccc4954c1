"""Does an engine start and serve at all: plain, with our drafts, and with a model that drafts beside them.

A tiny policy with random weights, and an EAGLE-3 head of the same kind. Requests have top-k. Before
these comes one with our defaults, vLLM's, and a large vocabulary: is there memory for its logits?
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from rollout_spec.certify.certify import CertifyPlan, engine, generate
from rollout_spec.certify.counts import Response, Sample
from rollout_spec.metrics import RequestCounters
from rollout_spec.trace import num_alike

POLICY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
HEAD = POLICY | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "draft_vocab_size": POLICY["vocab_size"], "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip
DRAFTS = {"num_speculative_tokens": 7, "batch_threshold": 64, "min_survival": 0.0}  # whatever may come
LARGE = "drafts at vLLM's defaults"
KINDS = {
    LARGE: ({}, False), "plain": (None, False), "drafts": (DRAFTS, False), "drafts and a head": (DRAFTS, True)
}  # fmt: skip
SMALL = {"max_model_len": 512, "max_num_seqs": 64}
NUM_SAMPLES, NUM_TOKENS = 16, 64


def run(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """After each engine what there is: of each its seconds until it could serve, and draft tokens.

    `same`: of the tokens without drafts, those before the first that a response of a kind has otherwise.
    Rounding may change some. With the large vocabulary there are none to compare with.
    """
    plan = _plan(Path(job["folder"]), job["dtype"], job["engine"], job["vocab_size"])
    samples = [Sample(number % 2, 1.0, number) for number in range(NUM_SAMPLES)]
    found, plain = dict[str, Any](), dict[Sample, Response]()
    has_own_runner = current_platform.is_out_of_tree()  # such a one takes no model beside our drafter
    kinds = [kind for kind, (_, has_head) in KINDS.items() if not (has_head and has_own_runner)]
    for kind in kinds:
        options, has_head = KINDS[kind]
        began = time.perf_counter()
        of_kind = plan if has_head else dataclasses.replace(plan, model_drafter=None)
        if kind == LARGE:
            its_own = {name: value for name, value in plan.engine.items() if name not in SMALL}
            of_kind = dataclasses.replace(of_kind, model=str(Path(job["folder"]) / "large"), engine=its_own)
        with engine(of_kind, options) as llm:
            seconds = time.perf_counter() - began
            responses = generate(llm, plan, samples)
        compared = [] if kind == LARGE else samples
        plain = plain or (responses if compared else {})
        counters = RequestCounters.sum(each.counters for each in responses.values())
        found[kind] = {
            "seconds": seconds,
            "num_draft_tokens": counters.num_draft_tokens,
            "num_accepted_tokens": counters.num_accepted_tokens,
            "same": sum(num_alike(plain[one].token_ids, responses[one].token_ids) for one in compared),
            "of": sum(len(plain[one].token_ids) for one in compared),
        }
        yield {"engines": found, "skipped": [f"{left}: not reached" for left in kinds if left not in found]}


def _plan(folder: Path, dtype: str, arguments: Mapping[str, Any], vocab_size: int) -> CertifyPlan:
    for name, config in (("policy", POLICY), ("head", HEAD), ("large", POLICY | {"vocab_size": vocab_size})):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    own = {"load_format": "dummy", "skip_tokenizer_init": True, **SMALL}
    drafter = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    return CertifyPlan(
        model=str(folder / "policy"), prompts=[[1, *range(8, 24)] * 2, [1, *range(30, 50)] * 2],
        temperatures=[1.0], nums_speculative_tokens=[7], batch_thresholds=[64], group_sizes=[8],
        max_tokens=NUM_TOKENS, top_k=20, top_p=1.0, seed=0, dtype=dtype, tolerance=None,
        engine={**arguments, **own}, model_drafter=drafter,
    )  # fmt: skip
