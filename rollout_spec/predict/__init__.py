"""What would drafting gain? Recorded rollouts, replayed or served by simulated engines; no model runs.

In: files of rollouts, options of the drafter, step times (a table, or a model's config and a device's name).
Out: counts, predicted seconds and shares: dataclasses and dictionaries that `cli` and `report` show.
May import: `config`, `homes`, `metrics`, `recurrent`, `trace`, `drafting`, numpy, pyarrow, tokenizers.
Never: starts an engine, measures a device, or writes a file.
"""
