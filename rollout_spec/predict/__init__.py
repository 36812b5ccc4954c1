"""What would drafting gain? Recorded rollouts, replayed or served by simulated engines; no model runs.

In: files of rollouts, options of the drafter, step times.
Out: counts, predicted seconds and shares: dataclasses and dictionaries that `cli` and `report` show.
May import: `config`, `placement`, `metrics`, `trace`, `drafting`, numpy, pyarrow, scipy, tokenizers.
Never: starts an engine, measures a device, or writes a file.
"""
