"""Where draft tokens come from: the native index, and when and how much to draft.

In: each row's tokens and level, once per engine step. Out: each row's draft tokens, and counters.
May import: `config`, `metrics`, numpy. Only `native` imports the C module, which needs cffi.
"""
