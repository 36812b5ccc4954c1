"""Why engines refuse a setting, where verl's driver refuses it too; imports nothing."""

from __future__ import annotations

# Heads that draft in another way than ours are made to.
GEMMA4 = "Gemma 4's drafter shares the target's KV cache"
STEP3P5 = "Step 3.5's drafter has a layer for each token"
MODULES = "an MTP head of several modules is not supported"
MIN_P = "vLLM refuses min_p together with speculative decoding"
PROCESSORS = "vLLM does not run custom logits processors with speculative decoding"
OWN_RUNNER = "this platform has a model runner of its own"
ADAPTERS = "vLLM cannot apply a LoRA adapter to draft tokens"
EXPERTS = "the data-parallel ranks of experts would not run the same passes of the drafter"
AHEAD = "must be False with vLLM's MRV1"
POSITIONS = "the drafter takes {0} positions, max_model_len is {1}: set max_model_len to at most {0}"
UNCOUPLED = "a draft model needs rollout.spec.verify=coupled (the default); you set standard"
WITHOUT_GRAPHS = (
    "compilation_config.cudagraph_mode=FULL_DECODE_ONLY: steps with drafts run without CUDA graphs; "
    "take FULL_AND_PIECEWISE"
)
