"""Where draft tokens come from: the native index, and when and how much to draft.

In: each row's tokens and level, once per engine step. Out: each row's draft tokens, and counters.
A step calls the index once for all rows, then while text is unindexed and there is time. The index alone
decides what leaves it when it is full.
May import: `config`, `metrics`, `trace`, numpy, scipy. Only `native` imports the C module, which needs cffi.
Never: changes what a request says, holds up a step for a long text, or knows torch, vLLM or verl.
"""
