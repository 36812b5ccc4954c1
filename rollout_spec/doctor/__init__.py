"""Can drafting work here? What is installed, what is registered, which patches fit (`doctor`).

In: nothing but this machine. Out: a list of checks, each with what to do.
May import: `config`, `environment`, `patches`, `drafting`, `vllm`, `verl`, hydra, omegaconf, torch, verl,
vllm. It starts no engine, and prints nothing.
"""
