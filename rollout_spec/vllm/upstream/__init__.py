"""Faults of vLLM that we fix, a module each: a file is deleted when its Patch's `until` has come.

In: a module of vLLM that has just been imported (MODULE), to be fixed by `fix`. Out: the same module,
patched where it is wrong; a PatchError where it is not the one that the fix knows.
`kept_logprobs`, `min_tokens` and `plain_steps` have neither MODULE nor `fix`: `mrv1.sampler` calls them.
`recurrent_rows`, `recurrent_counts` and `recurrent_chunks` have a `fix` of no one module: engines of
recurrent policies call it.
May import: `patches`, `verification`, `vllm`, numpy, torch, vllm.
Of `rollout_spec.vllm` it imports `options` only. It never draws a token and knows no drafter.
"""

from __future__ import annotations

from rollout_spec.vllm.upstream import (
    allowed_tokens,
    cpu_expand,
    cpu_rejection,
    embedded_prompts,
    reasoning_end,
    refused_requests,
    stop_strings,
    thinking_budget,
)

# Wrong with drafts only: without the fix, drafts would change what a request gets.
OF_DRAFTS = (cpu_expand, cpu_rejection, reasoning_end, refused_requests, stop_strings)
# Wrong without drafts too: where a fix does not fit, vLLM is left as it is.
OF_VLLM = (allowed_tokens, embedded_prompts, thinking_budget)
