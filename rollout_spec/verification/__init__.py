"""Which draft tokens the target keeps: lossless verification in plain torch, on any device.

In: the target's logits, the draft tokens, a noise key per request. Out: the tokens of each row.
May import: numpy, torch. It never loops over positions or requests. To draw it never holds a temporary of
the logits' size: it works in chunks of 16 MiB (`blocks`).
MRV1 draws with this. On MRV2 vLLM's own sampler draws: only a request's key and a model's `log_odds` are
taken from here.

Read in this order: `coupled`, how drafts are verified; `prefixes`, what each request gets; `noise`, random
numbers by request and position; `blocks`, long rows in parts; `transfers`, between host and device.

It uses operations only that torch_npu has too: `tests/test_device_waits.py` lists them.
"""
