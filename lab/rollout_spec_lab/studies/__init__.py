"""Programs behind single pages of the record, each started by hand.

In: arguments. Out: the figures of a page.
May import: rollout_spec, matplotlib, numpy, tqdm. Nothing imports them.
"""
