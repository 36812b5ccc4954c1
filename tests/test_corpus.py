"""The static corpus: drafts equal the oracle's, a file that is not whole is refused, its pages are shared."""

import hashlib
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.config import ConfigError, SpecConfig, UserError
from rollout_spec.drafting.corpus import (
    CONTENT_OFFSET,
    CorpusBuilder,
    check_corpus,
    open_corpus,
    write_corpus,
)
from rollout_spec.drafting.index import SuffixIndex, make_index
from rollout_spec.drafting.native import InvalidArgument
from tests.test_replay import write_trace
from tests.text import int32, save_corpus


@pytest.fixture
def path(tmp_path):
    return save_corpus(tmp_path / "corpus.sam", [range(100, 400), [100, 101, 7, 8]])


def test_numbers_of_a_corpus(path):
    corpus = open_corpus(path)
    assert corpus.num_tokens == 304
    # The root, 300 beginnings of the first text, 101 7 and 101 7 8 of the second.
    assert (corpus.num_states, corpus.num_transitions) == (303, 302 + 299 + 2)
    assert corpus.largest_token == 399
    assert list(path.parent.iterdir()) == [path]
    check_corpus(path)


def test_many_followers_are_found(tmp_path):
    tokens = np.random.default_rng(0).permutation(50_000).astype(np.int32)
    path = save_corpus(tmp_path / "wide.sam", [tokens])
    with SuffixIndex(num_speculative_tokens=1, corpus=open_corpus(path)) as index:
        group = index.open_group(int32())
        places = np.random.default_rng(1).choice(len(tokens) - 1, 200, replace=False)
        sequences = np.array([index.open_sequence(group) for _ in places], np.int32)
        rows = np.arange(len(places), dtype=np.int32)
        ones = np.ones(len(places), np.int32)
        result = index.index_and_draft(sequences, tokens[places][:, None], rows, ones, ones)
        assert result.draft_tokens[:, 0].tolist() == tokens[places + 1].tolist()


# Wrong words under a right checksum, by their place: after 16 bytes come states of len, link, count, first.
WRONG_WORDS = {
    "a cycle of links": (16 + 5 * 16 + 4, 5),
    "a link beyond the end": (16 + 5 * 16 + 4, 1 << 31),
    "transitions beyond the end": (16 + 5 * 16 + 12, (1 << 32) - 1),
    "a target beyond the end": (16 + 304 * 16 + 4, 1 << 30),
    "a token of no text": (16 + 304 * 16 + 8 * 400, 1 << 30),
}
VERSION = "of another version of rollout-spec or another byte order: build it again"
# The file in place of a whole one; whether an engine sees it, which reads its header only; the message.
DAMAGES = {
    "another version": (lambda whole: whole[:20] + b"7" + whole[21:], True, VERSION),
    "another byte order": (lambda w: w[:22] + b"middle\n".ljust(10, b"\0") + w[32:], True, VERSION),
    "foreign": (lambda whole: b"PK\x03\x04abcd" + whole[8:], True, "not a corpus of rollout-spec"),
    "empty": (lambda whole: b"", True, "not a corpus of rollout-spec"),
    "cut in the header": (lambda whole: whole[:50], True, "cut short or added to"),
    "cut short": (lambda whole: whole[:-1], True, "cut short or added to"),
    "added to": (lambda whole: whole + b"\0", True, "cut short or added to"),
    "damaged": (
        lambda whole: whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:],
        False,
        "damaged, its checksum does not match",
    ),
    **{
        name: (
            lambda whole, word=word: with_word(whole, *word),
            False,
            r"damaged before its checksum was made \(corpus: .+\): build it again",
        )
        for name, word in WRONG_WORDS.items()
    },
}


def with_word(whole, place, value):
    content = bytearray(whole)
    struct.pack_into("=I", content, CONTENT_OFFSET + place, value)
    content[32:64] = hashlib.sha256(content[CONTENT_OFFSET:]).digest()
    return bytes(content)


def check_refused(path, is_seen_at_start, message, capsys):
    with pytest.raises(ConfigError, match=rf"^rollout\.spec\.corpus='{path}': {message}"):
        check_corpus(path)
    if is_seen_at_start:
        with pytest.raises(ConfigError, match=message):
            make_index(SpecConfig(corpus=str(path)))
    trace = write_trace(path.parent / "trace.jsonl", ([1], [[1, 2]]))
    assert command("replay", trace, "--spec", f"corpus={path}") == 2
    assert re.fullmatch(
        rf"rollout-spec replay: rollout\.spec\.corpus='{path}': {message}.*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(("damage", "is_seen_at_start", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_whole_is_refused(path, capsys, damage, is_seen_at_start, message):
    path.write_bytes(damage(path.read_bytes()))
    check_refused(path, is_seen_at_start, message, capsys)


def test_what_is_no_file_is_refused(path, capsys):
    path.unlink()
    check_refused(path, True, "No such file or directory", capsys)
    path.mkdir()
    check_refused(path, True, "Is a directory", capsys)


@pytest.mark.parametrize(
    ("field", "value", "drafted"),
    [("token", 8, 8), ("token", 31, 9), ("token", 2**32 - 2, 9), ("count", 2, 9)],
)
def test_what_is_wrong_about_a_continuation_leaves_the_groups_own(tmp_path, field, value, drafted):
    """The last one of the corpus is wrong; a sibling goes on with 9 after the 7, another group with 30."""
    path = save_corpus(tmp_path / "corpus.sam", [range(1, 9)])
    content = np.frombuffer(path.read_bytes(), np.uint32, offset=CONTENT_OFFSET).copy()
    states, transitions = content[4:44].reshape(10, 4), content[44:].reshape(15, 2)
    assert states[8].tolist() == [8, 0, 1, 15] and transitions[14].tolist() == [8, 8]
    if field == "token":
        transitions[14, 0] = value
    else:
        states[8, 2] = value
    write_corpus(
        path,
        content.nbytes,
        lambda mapped: mapped.__setitem__(slice(CONTENT_OFFSET, None), content.tobytes()),
    )
    with SuffixIndex(num_speculative_tokens=1, corpus=open_corpus(path)) as index:
        group, other = (index.open_group(int32()) for _ in range(2))
        for handle, text in ((group, [7, 9]), (other, [7, 30]), (group, range(1, 8))):
            sequence = int32(index.open_sequence(handle))
            result = index.index_and_draft(sequence, int32(*text)[None], int32(0), int32(len(text)), int32(1))
        assert result.draft_tokens[0, : result.num_draft_tokens[0]].tolist() == [drafted]


def test_bytes_that_are_no_corpus_are_refused(path):
    whole = open_corpus(path)
    for num_bytes in (0, 8, 16, 31, 4096):
        content = bytes(CONTENT_OFFSET + num_bytes)
        with pytest.raises(InvalidArgument, match=rf"^corpus: {num_bytes} bytes that are no corpus"):
            SuffixIndex(num_speculative_tokens=1, corpus=whole._replace(mapped=content))
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\]=-1: must not be negative"):
        CorpusBuilder().add(int32(1, -1))


def test_a_failed_write_leaves_the_older_file(path):
    before = path.read_bytes()

    def fill(mapped):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(path, 1000, fill)
    with pytest.raises(UserError, match=r"corpus.*: (File too large|No space left)"):
        write_corpus(path, 1 << 60, lambda mapped: None)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_replaced_stays_with_those_that_have_it_open_and_share_its_pages(path):
    corpus = open_corpus(path)
    before = corpus.mapped[:]
    maps = next(line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line)
    assert maps.split()[1] == "r--s"
    save_corpus(path, [[1, 2, 3]])
    assert corpus.mapped[:] == before
    assert open_corpus(path).num_tokens == 3


def command(*arguments):
    return main([str(argument) for argument in arguments])


def test_build_takes_the_responses_of_traces(tmp_path, capsys):
    first = write_trace(tmp_path / "a.jsonl", ([1], [[5, 6, 7, 8], [5, 6]]), ([1], [[9]]))
    second = write_trace(tmp_path / "b.jsonl.gz", ([1], [[7, 8, 3]]))
    output = tmp_path / "corpus.sam"
    assert command("corpus", "build", first, second, "-o", output, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["output"] == str(output)
    assert (values["num_files"], values["num_texts"], values["num_tokens"]) == (2, 4, 10)
    assert values["num_bytes"] == output.stat().st_size == 10 * values["bytes_per_token"]
    by_hand = save_corpus(tmp_path / "hand.sam", [[5, 6, 7, 8], [5, 6], [9], [7, 8, 3]])
    assert output.read_bytes() == by_hand.read_bytes()
    assert command("corpus", "build", first, "-o", output) == 0
    assert "bytes per token" in capsys.readouterr().out
    assert open_corpus(output).num_tokens == 7


def test_a_link_stays_and_what_is_no_corpus_is_refused(tmp_path, capsys):
    write_trace(tmp_path / "good.jsonl", ([1], [[1, 2]]))
    (tmp_path / "target.sam").touch()
    (tmp_path / "link.sam").symlink_to("target.sam")
    assert command("corpus", "build", tmp_path / "good.jsonl", "-o", tmp_path / "link.sam") == 0
    assert (tmp_path / "link.sam").is_symlink() and open_corpus(tmp_path / "target.sam").num_tokens == 2
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    capsys.readouterr()
    for name in ("pipe", "loop"):
        assert command("corpus", "build", tmp_path / "good.jsonl", "-o", tmp_path / name) == 2
        assert f"{name}: must be a plain file in a folder that exists" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "loop").is_symlink()
    recorded = (tmp_path / "good.jsonl").read_bytes()
    assert command("corpus", "build", tmp_path / "good.jsonl", "-o", tmp_path / "good.jsonl") == 2
    assert "good.jsonl: is there already, and is no corpus: name another file" in capsys.readouterr().err
    assert (tmp_path / "good.jsonl").read_bytes() == recorded
    assert command("corpus", "build", tmp_path / "good.jsonl", "-o", tmp_path / "target.sam") == 0


@pytest.mark.parametrize(
    ("file", "output", "message"),
    [
        ("nowhere.jsonl", "corpus.sam", "nowhere.jsonl: No such file or directory"),
        (
            "good.jsonl",
            "nowhere/corpus.sam",
            "nowhere/corpus.sam: must be a plain file in a folder that exists",
        ),
        ("good.jsonl", ".", "must be a plain file in a folder that exists"),
        ("empty.jsonl", "corpus.sam", "no token in any response"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_leaves_nothing(tmp_path, capsys, file, output, message):
    write_trace(tmp_path / "good.jsonl", ([1], [[1, 2]]))
    write_trace(tmp_path / "empty.jsonl", ([1], [[]]))
    before = set(tmp_path.iterdir())
    assert command("corpus", "build", tmp_path / file, "-o", tmp_path / output) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("rollout-spec corpus build: ") and error.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_a_corpus_that_holds_what_is_replayed_is_said(tmp_path, caplog):
    old, new = list(range(10, 60)), list(range(30, 80))
    built = write_trace(tmp_path / "built.jsonl", ([1], [old, [5, 6]]))
    replayed = write_trace(tmp_path / "replayed.jsonl", ([1], [new, old[5:45], [5, 6]]))
    assert command("corpus", "build", built, "-o", tmp_path / "corpus.sam") == 0
    for trace, held in ((built, "1 of 1"), (replayed, "1 of 2")):
        caplog.clear()
        assert command("replay", trace, "--spec", f"corpus={tmp_path / 'corpus.sam'}") == 0
        [message] = caplog.messages
        assert f"corpus.sam holds {held} replayed responses of 16 tokens or more word for word" in message


def test_replay_takes_a_corpus(tmp_path, capsys):
    text = list(range(10, 60))
    trace = write_trace(tmp_path / "trace.jsonl", ([1], [text]))
    assert command("corpus", "build", trace, "-o", tmp_path / "corpus.sam") == 0
    found = []
    for options in ((), ("--spec", f"corpus={tmp_path / 'corpus.sam'}")):
        capsys.readouterr()
        assert command("replay", trace, "--json", "--spec", "min_survival=0", *options) == 0
        found.append(json.loads(capsys.readouterr().out)["tokens_per_step"])
    assert found[0] == 1.0 and found[1] > 5
    assert command("replay", trace, "--spec", f"corpus={tmp_path / 'corpus.sam'}") == 0
    assert "corpus.sam" in capsys.readouterr().out.replace("\n", "")
