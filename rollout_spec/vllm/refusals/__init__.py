"""What engines and requests are refused for: `checks` finds the facts of an engine, `table` judges them."""
