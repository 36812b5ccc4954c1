"""Whether a step drafts, and how much: one number, from measured step times.

In: what the step that has ended was and took. Out: the least survival that is drafted, and each row's length.
May import: `config`, `metrics`, numpy, scipy.
Never: reads a token, or asks the clock; times come with the step.
"""
