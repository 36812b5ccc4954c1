"""Programs behind single pages of the record, each started by hand: `mutants`.

In: arguments. Out: the figures of a page.
May import: rollout_spec. Nothing imports them.
"""
