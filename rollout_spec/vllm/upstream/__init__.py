"""Faults of vLLM that we fix, a module each: a file is deleted when its Patch's `until` has come.

In: a module of vLLM. Out: the same module, patched where it is wrong; a PatchError where it is not the one
that the fix knows. Each file has `PATCH`; `WHERE`, the module that `fix` is given once it is imported, by
the engines that need it; `fix`, which may be called again; and `applies`, if not every vLLM has the fault.
`vllm.fixes` finds them by itself. They never draw a token, and know no drafter.
May import: `patches`, `recurrent`, `vllm.mrv1.prompt_rows`, numpy, torch, vllm.
"""

# Which engines need a fix. Where it does not fit, ALL keep vLLM's fault, which they have without drafts too.
# Any others are refused: drafts would change what a request gets.
ALL = "all"
WITH_DRAFTS = "with drafts"
RECURRENT_MRV1 = "recurrent on MRV1"
RECURRENT_MRV2 = "recurrent on MRV2"
