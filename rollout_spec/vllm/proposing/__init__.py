"""Who drafts for the rows of an engine, on either runner, and what it knows of requests and of other ranks.

A worker's runner asks the `proposer`, which tells the drafter of the `live_requests`, says what steps process
(`other_ranks`), and keeps the counts. Between steps a rollout server asks by `control` for texts and counts.
"""
