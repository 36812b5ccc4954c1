"""Do drafts change anything, and does everything fit? `certify` and `doctor`.

In: a model and prompts, or this machine. Out: every difference explained, or a list of checks.
May import: `config`, `metrics`, `patches`, `drafting`, `report`, `verification`, `vllm`, `verl`, hydra,
numpy, omegaconf, torch, verl, vllm. It never imports the laboratory, and starts engines in `certify.py` only.
"""
