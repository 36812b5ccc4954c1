"""Programs behind single pages of the record, each started by hand.

In: arguments. Out: the figures of a page.
May import: rollout_spec, `bench`, `demo`, matplotlib, numpy, tqdm, `verl_cpu`. Nothing imports them.
"""
