"""What is refused, and why: one table, by which verl's driver and each engine judge what is asked for.

The driver sees verl's configuration and each model's config.json, an engine vLLM's. Both state the facts that
they can see. Imports no vLLM.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from rollout_spec import recurrent
from rollout_spec.config import MAX_ON_NPUS, ConfigError, SpecConfig
from rollout_spec.vllm import versions
from rollout_spec.vllm.options import MODEL_METHODS

_NOT_MRV2 = "vLLM's MRV2 cannot be used with rollout_spec: {found.why}. Set VLLM_USE_V2_MODEL_RUNNER=0"
OWN_RUNNER = "this platform has a model runner of its own"


class Refusal(NamedTuple):
    """In both, {found} is what was found, {found.NAME} of several; {model} and {engine}: see `refuse`."""

    setting: str  # which asks for it
    why: str


_OUR_NOISE = {
    "misfit": ("rollout.spec.method={found.method}", _NOT_MRV2),
    "others_draft":
        ("speculative_config.method={found.method}",
         f"rollout.spec.method={{found.ours}} goes with {', '.join(MODEL_METHODS)}, or with none"),
    "partial_logits":
        ("additional_config.{found}",
         "not with rollout_spec, which draws each token from the whole of its logits; switch it off"),
}  # fmt: skip
_OUR_DRAFTER = {
    "untested_vllm":
        ("vllm {found}", f"is newer than what our tests have run ({', '.join(versions.TESTED)}): set "
         "rollout.spec.untested_vllm=true to try it, and compare its tokens by `rollout-spec certify`"),
    "untested_policy": ("rollout.spec.method=sam", "{found}"),
    "recurrent_on_own_runner":
        ("rollout.spec.method=sam", f"{{found}} has recurrent layers, and {OWN_RUNNER}"),
    "long_drafts":  # an engine ends in an assertion of its attention
        ("rollout.spec.num_speculative_tokens={found}", f"must be at most {MAX_ON_NPUS} with vllm-ascend"),
    "short_pieces":  # else an engine ends in an assertion of its scheduler when a request joins
        ("{engine}long_prefill_token_threshold={found.asked}",
         "must be 0, or at least 1 + num_speculative_tokens, {found.least}, with vLLM 0.29 and later"),
    "recurrent_on_mrv2":
        ("rollout.spec.method=sam",
         "{found} has recurrent layers, whose drafts need MRV1 before vLLM 0.29: "
         "set VLLM_USE_V2_MODEL_RUNNER=0"),
    "recurrent_on_cpus":
        ("rollout.spec.method=sam",
         "{found.policy} has recurrent layers, whose kernels for CPUs take no drafts of different lengths in "
         "{found.dtype}"),
    "stages":
        ("pipeline_parallel_size={found}",
         "must be 1 with rollout.spec.method=sam, whose drafts reach one stage only"),
    "prefill_parts":
        ("prefill_context_parallel_size={found}",
         "must be 1 with rollout.spec.method=sam, which each of its ranks would choose by its own clock"),
    "full_graphs":
        ("compilation_config.cudagraph_mode=FULL",
         "MRV2 before vLLM 0.32 captures for rows of one token, so with FlashAttention 3 draft tokens could "
         "read later ones; take FULL_AND_PIECEWISE"),
    "launched":
        ("rollout.spec.batch_threshold=auto",
         "must be a number with distributed_executor_backend=external_launcher, where each tensor-parallel "
         "rank would choose by its own clock"),
    "lossy":
        ("speculative_config.rejection_sample_method={found}",
         "must be standard or block with rollout.spec.method=sam: it changes what the policy says"),
    "own_gate":
        ("speculative_config.num_speculative_tokens_per_batch_size",
         "the drafter has its own gate; set rollout.spec.batch_threshold instead"),
}  # fmt: skip
_A_MODEL = {  # whose drafts we verify; what asks for it is `{model}`
    "model_on_own_runner": OWN_RUNNER,
    "gemma4_head": "Gemma 4's drafter shares the target's KV cache",
    "step3p5_head": "Step 3.5's drafter has a layer for each token",
    "several_modules": "an MTP head of several modules is not supported",
    "adapters": "{found}: vLLM cannot apply a LoRA adapter to draft tokens",
    "parallel_experts": "the data-parallel ranks of experts would not run the same passes of the drafter",
    "few_positions":
        "the drafter takes {found.most} positions, max_model_len is {found.asked}: set max_model_len to at "
        "most {found.most}",
    "parallel_drafting": "we draw draft tokens one after the other; parallel drafting draws them at once",
    "adaptive": "enable_adaptive_verification reads a confidence that drafts with shared noise do not leave",
    "local_argmax": "use_local_argmax_reduction finds the likeliest token, and a draft's is drawn",
    "model_lossy": "rejection_sample_method must be standard: our verification has a way of its own",
    "watermark":
        "watermark_config: a watermark follows from the tokens before it, and our verification draws all of "
        "a draft's at once",
    "other_vocabulary": "use_heterogeneous_vocab: needs a drafter with the policy's vocabulary",
    "model_stages": "pipeline_parallel_size must be 1",
    "model_misfit": _NOT_MRV2 + "; steps are then scheduled synchronously (slower)",
    "unpadded": "disable_padded_drafter_batch must be False",
}  # fmt: skip
_ANY_DRAFTS = {
    "last_loop":  # of Dory, from vLLM 0.33 on
        ("recurrent_kv_cache_mode={found}",
         "within a step a token reads other keys and values of earlier tokens than across steps, so drafts "
         "would change the tokens; run this policy without drafts"),
    "open_regions":  # of Step 5, from vLLM 0.33 on
        ("{found}",
         "vLLM checks for drafts of its own MTP head only that it keeps what its indexer reads, so others "
         "could change the tokens; run this policy without them"),
    "growing_rope":
        ("max_model_len={found.asked}",
         "vLLM's Transformers backend rotates this policy's keys by the longest row of a step beyond "
         "{found.most} positions, so drafts would change the tokens: set max_model_len to at most "
         "{found.most}"),
    "wide_logits":
        ("{engine}max_num_batched_tokens={found.asked}",
         "before vLLM 0.29, MRV2 counts a step's logits in 32 bits, and drafts could make more: set it to at "
         "most {found.most}"),
    "packed_cache":
        ("{engine}kv_cache_dtype={found}",
         "its attention takes a row with drafts for a new one beside a prompt that is at least as long, so "
         "drafts would change the tokens; run this policy without them"),
    "m3_cache":  # with vLLM 0.32 and later
        ("{engine}kv_cache_dtype={found}",
         "MiniMax M3's kernels for it end the engine in a step with many drafts; take another cache, or run "
         "this policy without them"),
    "processors":
        ("{engine}logits_processors", "vLLM does not run custom logits processors with speculative decoding"),
    "min_p":
        ("{engine}override_generation_config.min_p", "vLLM refuses min_p together with speculative decoding"),
    "ahead": ("{engine}async_scheduling", "must be False with {found}"),
}  # fmt: skip
_OF_MODEL = {fact: ("{model}", why) for fact, why in _A_MODEL.items()}
# Of facts that are asked together and apply, the first is said.
_ROWS = _OUR_NOISE | _OF_MODEL | _OUR_DRAFTER | _ANY_DRAFTS
REFUSALS = {fact: Refusal(*row) for fact, row in _ROWS.items()}


def refuse(facts: Mapping[str, Any], model: str, engine: str = "") -> None:
    """Raise a ConfigError for the first row of the table that is so; it names the setting and the reason.

    facts: of the table, as far as they are known, each with what was found.
    model: what asks for a model that drafts.
    engine: what stands before the names of vLLM's options.
    """
    assert facts.keys() <= REFUSALS.keys(), facts
    for fact, refusal in REFUSALS.items():
        if found := facts.get(fact):
            where = refusal.setting.format(found=found, model=model, engine=engine)
            raise ConfigError(f"{where}: {refusal.why.format(found=found)}")


def facts_both_see(
    config: SpecConfig, policy: str | None, has_own_runner: bool, longest_piece: int | None
) -> dict[str, Any]:
    """The facts of an engine with our drafter that the driver sees as an engine does.

    policy: its architecture, if it has recurrent layers.
    has_own_runner: whether the platform has, as NPUs have.
    longest_piece: `long_prefill_token_threshold`; 0 or None: any.
    """
    k = config.num_speculative_tokens
    is_short = longest_piece and longest_piece < 1 + k and not versions.is_before(29)
    return {
        "untested_vllm": not config.untested_vllm and versions.untested(),
        "untested_policy": policy and recurrent.refusal(policy, versions.minor(versions.version())),
        "recurrent_on_own_runner": has_own_runner and policy,
        "long_drafts": has_own_runner and k > MAX_ON_NPUS and k,
        "short_pieces": is_short and SimpleNamespace(asked=longest_piece, least=1 + k),
    }
