"""What engines and single requests are refused for: `checks` finds facts of an engine, `table` judges them.

verl's driver judges what it sees by the same table. `refused_requests` stops single requests.
"""
