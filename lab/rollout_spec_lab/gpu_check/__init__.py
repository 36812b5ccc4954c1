"""One report of what drafts gain on this device, and whether the tokens are the same.

In: a model and minutes. Out: a record and its page.
May import: rollout_spec, `bench`, numpy, torch, vllm. Each part runs in a process of its own.
"""

PARTS = ("doctor", "latency", "start", "verify", "certify", "steps", "rollouts")
ON_MRV2 = " on MRV2"  # after the name of a part
