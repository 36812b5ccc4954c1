"""Which draft tokens the target keeps: lossless verification in plain torch, on any device.

In: the target's logits, the draft tokens, a noise key per request. Out: the tokens of each row.
May import: numpy, torch.

Read in this order: `coupled` (the default) or `standard`, two ways to verify; `prefixes`, what both make of
the draft tokens that hold; `noise`, random numbers by request and position; `blocks`, long rows in parts;
`transfers`, what goes between host and device.

No function loops over positions or requests, except over requests that bring a generator of their own.
A temporary as large as the logits is made in chunks of 16 MiB (`blocks.rows_at_a_time`).

The operations, views and copies apart, all of which torch_npu has (read in its op-plugin's list,
op_plugin/config/op_plugin_functions.yaml, for torch 2.1 to 2.8; not run): add, amax, arange, argmax,
bitwise_and, bitwise_xor, cat, clamp, div, eq, exp, exponential, floor_divide, full, gather, ge, gt, index,
index_put, index_select, irshift, le, log, log1p, lt, masked_fill, mul, neg, nonzero, ones, rand, remainder,
repeat_interleave, scatter, softmax, sub, sum, uniform, where, zeros.
"""
