"""Which draft tokens the target keeps: lossless verification in plain torch, on any device.

In: the target's logits, the draft tokens, a noise key per request. Out: the tokens of each row.
May import: numpy, torch. It never loops over positions or requests. To draw it never holds a temporary of
the logits' size: it works in chunks of 16 MiB (`blocks`).
MRV1 draws with this. On MRV2 vLLM's own sampler draws: only a request's key and a model's `log_odds` are
taken from here.

Read in this order: `coupled`, how drafts are verified; `prefixes`, what each request gets; `noise`, random
numbers by request and position; `blocks`, long rows in parts; `transfers`, between host and device.

The operations of `coupled` but `log_odds`, views and copies apart, all of which torch_npu has (read in its
op-plugin's list, op_plugin/config/op_plugin_functions.yaml, for torch 2.1 to 2.8; not run): add, amax,
arange, argmax, bitwise_and, bitwise_xor, cat, clamp, div, exp, floor_divide, gather, ge, gt, index,
index_put, index_select, irshift, log, log1p, lt, masked_fill, mul, neg, nonzero, ones, remainder, sub, sum,
where, zeros.
"""
