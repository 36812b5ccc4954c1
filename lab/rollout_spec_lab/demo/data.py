"""The demo's training problems: small arithmetic with an answer that a rule can check."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = "rollout_spec_demo"


class Problem(NamedTuple):
    """What is asked, how the answer is checked (number, list, json or records) and the right answer."""

    text: str
    kind: str
    answer: str


_NAMES = ("Mia", "Jonas", "Aiko", "Tariq", "Elena", "Bruno", "Nadia", "Oskar", "Lucia", "Samir")
_THINGS = ("apples", "marbles", "stickers", "pencils", "shells", "stamps", "buttons", "tickets")
_PLACES = ("at the market", "from a friend", "in a box in the attic", "at the school fair", "in the garden")
_WORKED = "Explain each step. End with a line of the form 'Answer: <number>'."


def _story(rng: random.Random) -> Problem:
    name, thing, place = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_PLACES)
    start, found, given = rng.randint(5, 60), rng.randint(2, 40), rng.randint(1, 5)
    text = (
        f"{name} has {start} {thing}. {name} gets {found} more {place} and then gives {given} to a "
        f"neighbour. How many {thing} does {name} have now? {_WORKED}"
    )
    return Problem(text, "number", str(start + found - given))


def _shopping(rng: random.Random) -> Problem:
    name, first, second = rng.choice(_NAMES), *rng.sample(_THINGS, 2)
    counts, prices = [rng.randint(2, 6) for _ in "ab"], [rng.randint(2, 9) for _ in "ab"]
    text = (
        f"{name} buys {counts[0]} {first} for {prices[0]} coins each and {counts[1]} {second} for "
        f"{prices[1]} coins each. What is the total price? {_WORKED}"
    )
    return Problem(text, "number", str(counts[0] * prices[0] + counts[1] * prices[1]))


def _comparison(rng: random.Random) -> Problem:
    left, right = rng.sample(range(11, 99), 2)
    text = f"Which number is greater, {left} or {right}? Reply with one short line: 'Answer: <number>'."
    return Problem(text, "number", str(max(left, right)))


def _sequence(rng: random.Random) -> Problem:
    start, step, length = rng.randint(1, 20), rng.randint(2, 9), rng.randint(6, 14)
    shown = ", ".join(str(start + step * i) for i in range(4))
    answer = ", ".join(str(start + step * i) for i in range(4, 4 + length))
    text = (
        f"The sequence {shown} grows by the same amount each time. Write the next {length} numbers, one "
        "per line with the addition that gives it. End with 'Answer:' and all of them separated by commas."
    )
    return Problem(text, "list", answer)


def _sorting(rng: random.Random) -> Problem:
    numbers = rng.sample(range(1, 100), rng.randint(4, 8))
    text = (
        f"Sort these numbers from the smallest to the largest: {', '.join(map(str, numbers))}. "
        "End with 'Answer:' and the sorted numbers separated by commas."
    )
    return Problem(text, "list", ", ".join(map(str, sorted(numbers))))


def _times_table(rng: random.Random) -> Problem:
    factor, last = rng.randint(3, 12), rng.randint(6, 12)
    text = (
        f"Write the multiplication table of {factor} from {factor} x 1 to {factor} x {last}, one product per "
        "line. End with 'Answer:' and the products separated by commas."
    )
    return Problem(text, "list", ", ".join(str(factor * i) for i in range(1, last + 1)))


def _order(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    text = (
        f"{name} orders {count} {thing} for {price} coins each. Write the order as a JSON object with the "
        "keys customer, item, quantity, unit_price and total. Then explain each value in one sentence."
    )
    answer = {"customer": name, "item": thing, "quantity": count, "unit_price": price, "total": count * price}
    return Problem(text, "json", json.dumps(answer))


def _records(rng: random.Random) -> Problem:
    things = rng.sample(_THINGS, rng.randint(5, 8))
    records = [{"item": thing, "price": rng.randint(2, 60)} for thing in things]
    lines = "\n".join(f"{record['item']} cost {record['price']}" for record in records)
    text = (
        'Write each line as JSON, like this: pens cost 4 -> {"item": "pens", "price": 4}\n'
        f"Do the same for every line:\n{lines}"
    )
    return Problem(text, "records", "\n".join(map(json.dumps, records)))


# Long and short answers alternate: what is left when the short ones have ended is the long tail.
FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (
    _records, _comparison, _order, _sorting, _times_table, _story, _sequence, _shopping,
)  # fmt: skip


def make_rows(num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Rows with verl's columns; the families take turns, so any stretch of them is mixed."""
    rng = random.Random(f"{split}/{seed}")
    rows = []
    for index in range(num_rows):
        problem = FAMILIES[index % len(FAMILIES)](rng)
        rows.append(
            {
                "data_source": f"{SOURCE}/{problem.kind}",
                "prompt": [{"role": "user", "content": problem.text}],
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"split": split, "index": index, "kind": problem.kind},
            }
        )
    return rows


def make_data(folder: str | Path, num_train: int = 64, num_val: int = 14, seed: int = 7) -> tuple[Path, Path]:
    """Write train.parquet and val.parquet into `folder`; the same arguments give the same rows."""
    import pandas

    train, val = Path(folder, "train.parquet"), Path(folder, "val.parquet")
    train.parent.mkdir(parents=True, exist_ok=True)
    for file, num_rows in ((train, num_train), (val, num_val)):
        pandas.DataFrame(make_rows(num_rows, seed, file.stem)).to_parquet(file, index=False)
    return train, val
