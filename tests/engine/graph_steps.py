"""Steps with drafts and without, and the CUDA graph that vLLM takes for each."""

K = 8  # draft tokens
# How many tokens each row has: in plain steps of all sizes that an engine here serves, in one with drafts,
# and in one of longest drafts only.
STEPS = [[[1] * num_rows for num_rows in range(1, 17)], [[1 + K, 1, 4]], [[1 + K] * 2]]
# Of each of vLLM's modes, on both runners.
GRAPHS = {
    "FULL_AND_PIECEWISE": ["FULL", "PIECEWISE", "PIECEWISE"],
    "FULL_DECODE_ONLY": ["FULL", "NONE", "NONE"],
    "PIECEWISE": ["PIECEWISE", "PIECEWISE", "PIECEWISE"],
}
