"""Programs behind single pages of the record, each started by hand: `mutants`, `when_it_pays`.

In: arguments. Out: the figures of a page.
May import: rollout_spec, `bench`, `roofline`, matplotlib. Nothing imports them.
"""
