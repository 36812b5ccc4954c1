"""What MRV1 and MRV2 both need: graphs, rows of logits, top-k and top-p, and what both say."""

WHY_COUPLED = (
    "rejection sampling needs noise that a plain step does not, so the same seed gives other tokens with "
    "drafts than without; used by engines that draft, or with method=keyed"
)
WHY_SHARED_NOISE = (
    "vLLM drafts the likeliest tokens, or draws with noise of their own: both are less often accepted than "
    "tokens drawn with the target's noise, which coupled verification allows; used by engines that draft, or "
    "with method=keyed, beside a model that drafts"
)
# Here nothing is imported, so verl's driver can say it too.
WITHOUT_GRAPHS = (
    "compilation_config.cudagraph_mode=FULL_DECODE_ONLY: steps with drafts run without CUDA graphs; "
    "take FULL_AND_PIECEWISE"
)
