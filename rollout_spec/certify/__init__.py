"""Do drafts change a token? The same requests with drafts and without, compared token by token (`certify`).

In: a model and prompts. Out: a record with every difference and its explanation.
May import: `config`, `environment`, `metrics`, `report`, `verification`, `vllm`, numpy, torch, vllm. Only
`certify.py` starts engines, and nothing here prints.
"""
