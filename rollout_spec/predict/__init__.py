"""What would drafting gain? Rollouts read from disk, replayed, and simulated on a device's step times.

In: recorded rollouts, options, step times. Out: numbers and dataclasses, which `cli` prints.
May import: `config`, `trace`, `drafting`, `verl`, numpy, pyarrow, tokenizers. It starts no engine.
"""
