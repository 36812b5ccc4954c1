"""What a user checks before a training: drafts change no token (`certify`), and all fits (`doctor`).

In: a model and prompts; or nothing but this machine. Out: a record with every difference and its explanation;
or a list of checks with what to do.
May import: `config`, `metrics`, `patches`, `drafting`, `report`, `verification`, `vllm`, `verl`, hydra,
numpy, omegaconf, torch, verl, vllm. Only `certify.py` starts engines, and nothing here prints.
"""
