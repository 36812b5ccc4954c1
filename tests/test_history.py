"""Responses of earlier steps: kept, bounded, saved, and used when their prompt comes back."""

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import history as history_module
from rollout_spec.drafting import history_pieces
from rollout_spec.drafting.history import History, group_key, prompt_key
from rollout_spec.drafting.history_pieces import HistoryError, read_file
from rollout_spec.files import write_files
from rollout_spec.predict.replay import replay
from rollout_spec.trace import Rollout
from tests.text import int32


def texts(history, key):
    return [response.tolist() for response in history.get(key)]


def test_keys_tell_prompts_groups_and_samples_apart():
    keys = [*map(prompt_key, (int32(1, 2), int32(1, 2, 3))), *map(group_key, ("1", 1, "12"))]
    keys += map(history_module.sample_key, ("1", 1, "12"))
    assert len(set(keys)) == len(keys)
    # What another release has saved is found.
    assert keys[0].hex() == "21c1ea13e5b9528cf84dbec3eadb1b09"
    assert keys[2].hex() == "150ec49e758e674a2c9189ba6b164854"


@pytest.mark.parametrize(("piece_bytes", "num_pieces"), [(1 << 20, 1), (200, 4), (60, 8), (1, 9)])
def test_what_is_saved_comes_back(tmp_path, monkeypatch, piece_bytes, num_pieces):
    monkeypatch.setattr(history_pieces, "_PIECE_BYTES", piece_bytes)
    history = History(3, 1 << 20)
    for prompt in range(5):
        for response in range(prompt):
            history.add(prompt_key(int32(prompt)), np.arange(response, prompt * 10 + 1, dtype=np.int32))
    file = tmp_path / "a" / "folder" / "history"
    for _ in range(2):
        write_files(file.parent, {file.name: b"".join(history.all_pieces())})
    loaded = History(3, 1 << 20)
    assert len(read_file(file)) == num_pieces
    for piece in read_file(file):
        loaded.merge(piece)
    assert (len(loaded._texts), loaded.num_bytes) == (len(history._texts), history.num_bytes)
    for prompt in range(5):
        assert texts(loaded, prompt_key(int32(prompt))) == texts(history, prompt_key(int32(prompt)))
    pieces = read_file(file)
    if len(pieces) > 1:
        file.write_bytes(b"".join(pieces[:-1]))
        with pytest.raises(HistoryError, match=f"{file}: damaged, its end is missing"):
            read_file(file)
        file.write_bytes(b"".join(pieces))
    assert [path.name for path in file.parent.iterdir()] == ["history"]
    empty = tmp_path / "empty"
    empty.write_bytes(b"".join(History(3, 100).all_pieces()))
    loaded.merge(*read_file(empty))
    assert len(loaded._texts) == len(history._texts)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:-1], "damaged"),
        (lambda content: content[:70] + bytes([content[70] ^ 1]) + content[71:], "damaged"),
        (lambda content: content.replace(b"history 5", b"history 4", 1), "not a history of this version"),
        (lambda _: b"PK a foreign file", "not a history"),
        (lambda _: b"", "not a history"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, spoil, message):
    history = History(3, 1 << 20)
    history.add(b"a" * 16, int32(1, 2, 3))
    file = tmp_path / "history"
    file.write_bytes(spoil(b"".join(history.all_pieces())))
    with pytest.raises(HistoryError, match=f"{file}: {message}"):
        read_file(file)
    with pytest.raises(HistoryError, match=f"history of another engine or a checkpoint: {message}"):
        history.merge(file.read_bytes())
    assert texts(history, b"a" * 16) == [[1, 2, 3]]


def test_a_text_of_another_vocabulary_is_refused():
    giver, taker = History(3, 1 << 20), History(3, 1 << 20, vocab_size=100)
    for token in (99, 100):
        giver.add(b"a" * 16, int32(token))
        [piece] = giver.take_new()
        if token == 99:
            taker.merge(piece)
            continue
        with pytest.raises(HistoryError, match="has the token 100, the model's vocabulary is of 100"):
            taker.merge(piece)
    assert texts(taker, b"a" * 16) == [[99]]


def test_replay_takes_the_responses_of_earlier_lines_of_the_group():
    rng = np.random.default_rng(1)
    prompt = int32(1, 2, 3)
    response = rng.integers(0, 8, 300).astype(np.int32)  # no short context says what comes next
    trace = [Rollout("a", step, prompt, [response, response[::-1].copy()]) for step in (1, 2)]
    tokens_per_step = {}
    for history in (0, 1, 2):
        config = SpecConfig(history=history, min_survival=0.01)
        tokens_per_step[history] = replay(trace, config).total.tokens_per_step
    assert tokens_per_step[0] < tokens_per_step[1] < tokens_per_step[2]
