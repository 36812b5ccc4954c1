"""Programs behind single pages of the record, each started by hand.

In: arguments. Out: the figures of a page.
May import: rollout_spec, `bench`, `cli`, `demo`, hydra, matplotlib, numpy, omegaconf, tqdm,
transformers, verl, `verl_cpu`. Nothing imports them.
"""
