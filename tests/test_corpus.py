"""A corpus: what cannot be one is refused, what is one is drafted from, and `corpus build` makes it."""

import json
import os
import re

import numpy as np
import pytest

from rollout_spec import __version__
from rollout_spec.cli import main
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.drafting import index as index_module
from rollout_spec.drafting.index import make_index
from rollout_spec.trace import read_trace
from tests.text import int32, save_corpus, speak, write_trace


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("folder", "Is a directory"),
        (b"", "no token in any response"),
        (b'{"group": "0", "prompt_token_ids": [], "responses": [[]]}', "no token in any response"),
        (b"PK\x03\x04abcd\n", ".+corpus.jsonl:1: not JSON"),
        (b'{"prompt": "a text"}\n', ".+corpus.jsonl:1: group: is missing"),
        (b'{"group": "0", "prompt_token_ids": [], "responses": [[-1]]}', r".+ responses\[0\]\[0\]: -1 is"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path, refused, content, message):
    path = tmp_path / "corpus.jsonl"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^rollout\.spec\.corpus='{path}': {message}"):
        make_index(SpecConfig(corpus=str(path)))
    trace = write_trace(tmp_path / "trace.jsonl", ([1], [[1, 2]]))
    said = refused("replay", trace, "--spec", f"corpus={path}")
    assert re.match(rf"rollout-spec replay: rollout\.spec\.corpus='{path}': {message}", said)


def test_a_corpus_without_room_or_with_too_long_a_text_is_refused(tmp_path, monkeypatch):
    path = save_corpus(tmp_path / "corpus.jsonl", [speak(np.random.default_rng(0), 50_000).tolist()])
    with pytest.raises(ConfigError, match=r"corpus\.jsonl': takes more than max_index_mb=1; raise it"):
        make_index(SpecConfig(corpus=str(path), max_index_mb=1))
    make_index(SpecConfig(corpus=str(path), max_index_mb=8))
    monkeypatch.setattr(index_module, "read_corpus", lambda path: [np.zeros(1 << 24, np.int32)])
    with pytest.raises(ConfigError, match=r"^rollout\.spec\.corpus='a': token_ids: 16777216 tokens"):
        make_index(SpecConfig(corpus="a"))


def test_where_the_corpus_matches_longer_it_drafts(tmp_path):
    path = save_corpus(tmp_path / "corpus.jsonl", [range(1, 9), [7, 30]])
    index = make_index(SpecConfig(corpus=str(path), num_speculative_tokens=1))
    group = index.open_group(int32())
    for text, drafted in (([7, 9], []), (range(1, 8), [8]), ([7], [9])):
        sequence = int32(index.open_sequence(group))
        result = index.index_and_draft(sequence, int32(*text)[None], int32(0), int32(len(text)), int32(1))
        assert result.draft_tokens[0, : result.num_draft_tokens[0]].tolist() == drafted


def command(*arguments):
    return main([str(argument) for argument in arguments])


def test_build_takes_the_responses_of_traces(tmp_path, capsys):
    first = write_trace(tmp_path / "a.jsonl", ([1], [[5, 6, 7, 8], [5, 6]]), ([1], [[9]]))
    second = write_trace(tmp_path / "b.jsonl", ([1], [[7, 8, 3]]))
    output = tmp_path / "corpus.jsonl"
    assert command("corpus", "build", first, second, "-o", output, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "made_by": f"rollout_spec {__version__}", "output": str(output), "num_texts": 4, "num_tokens": 10,
    }  # fmt: skip
    texts = [text.tolist() for line in read_trace(output) for text in line.responses]
    assert texts == [[5, 6, 7, 8], [5, 6], [9], [7, 8, 3]]
    assert command("corpus", "build", first, "-o", tmp_path / "other.jsonl") == 0
    assert re.search(r"tokens +\S 7 ", capsys.readouterr().out)


def test_a_link_stays_and_what_is_there_is_refused(tmp_path, refused):
    good = write_trace(tmp_path / "good.jsonl", ([1], [[1, 2]]))
    (tmp_path / "target.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("target.jsonl")
    assert command("corpus", "build", good, "-o", tmp_path / "link.jsonl") == 0
    assert (tmp_path / "link.jsonl").is_symlink() and len(list(read_trace(tmp_path / "target.jsonl"))) == 1
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop"):
        said = refused("corpus", "build", good, "-o", tmp_path / name)
        assert f"{name}: must be a plain file in a folder that exists" in said
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "loop").is_symlink()
    recorded = good.read_bytes()
    said = refused("corpus", "build", good, "-o", good)
    assert "good.jsonl: is there already: name another file" in said
    assert good.read_bytes() == recorded


@pytest.mark.parametrize(
    ("file", "output", "message"),
    [
        ("nowhere.jsonl", "corpus.jsonl", "nowhere.jsonl: No such file or directory"),
        ("good.jsonl", "nowhere/corpus.jsonl", "nowhere/corpus.jsonl: must be a plain file in a folder"),
        ("good.jsonl", ".", "must be a plain file in a folder that exists"),
        ("empty.jsonl", "corpus.jsonl", "no token in any response"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_leaves_nothing(tmp_path, refused, file, output, message):
    write_trace(tmp_path / "good.jsonl", ([1], [[1, 2]]))
    write_trace(tmp_path / "empty.jsonl", ([1], [[]]))
    before = set(tmp_path.iterdir())
    said = refused("corpus", "build", tmp_path / file, "-o", tmp_path / output)
    assert message in said and said.startswith("rollout-spec corpus build: ")
    assert set(tmp_path.iterdir()) == before


def test_a_corpus_that_holds_what_is_replayed_is_said(tmp_path, caplog):
    old, new = list(range(10, 60)), list(range(30, 80))
    built = write_trace(tmp_path / "built.jsonl", ([1], [old, [5, 6]]))
    replayed = write_trace(tmp_path / "replayed.jsonl", ([1], [new, old, [5, 6]]))
    assert command("corpus", "build", built, "-o", tmp_path / "corpus.jsonl") == 0
    for trace, held in ((built, "1 of 1"), (replayed, "1 of 2")):
        caplog.clear()
        assert command("replay", trace, "--spec", f"corpus={tmp_path / 'corpus.jsonl'}") == 0
        [message] = caplog.messages
        assert f"corpus.jsonl holds {held} responses of 16 tokens or more word for word" in message
