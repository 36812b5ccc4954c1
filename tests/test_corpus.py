"""The static corpus: drafts equal the oracle's, a file that is not whole is refused, its pages are shared."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.cli import main
from rollout_spec.config import ConfigError, SpecConfig
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


@pytest.mark.parametrize(("repeated", "first"), [(False, 203), (True, 7)])
def test_the_corpus_counts_where_its_match_is_longer_than_the_groups(path, repeated, first):
    """Where the group continues as long a suffix, its continuation comes first."""
    prompt = int32(5, 200, 201, 202, 7, 5) if repeated else int32(5)
    text = np.append(prompt, int32(200, 201, 202))[None].astype(np.int32)
    with SuffixIndex(num_speculative_tokens=3, corpus=open_corpus(path)) as index:
        sequence = int32(index.open_sequence(index.open_group(prompt)))
        result = index.index_and_draft(sequence, text, int32(0), int32(text.size), int32(3))
        assert result.draft_tokens[0, 0] == first


def test_what_is_cleared_or_left_out_leaves_the_corpus(path):
    with SuffixIndex(num_speculative_tokens=3, corpus=open_corpus(path)) as index:
        for _ in range(2):
            sequence = int32(index.open_sequence(index.open_group(int32())))
            index.index_and_draft(sequence, int32(300, 301)[None], int32(0), int32(2), int32(3))
            index.index_and_draft(sequence, int32(300, 301, 302, -1)[None], int32(0), int32(4), int32(3))
            assert index.open_sequence(0) == sequence[0]
            result = index.index_and_draft(sequence, int32(300, 301, 302)[None], int32(0), int32(3), int32(3))
            assert result.draft_tokens[0].tolist() == [303, 304, 305]
            index.validate()
            index.clear()


def test_numbers_of_a_corpus(path):
    corpus = open_corpus(path)
    assert corpus.num_tokens == 304
    # The root, 300 beginnings of the first text, 101 7 and 101 7 8 of the second.
    assert (corpus.num_states, corpus.num_transitions) == (303, 302 + 299 + 2)
    assert list(path.parent.iterdir()) == [path]
    check_corpus(path)


@settings(deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=6))
def test_the_largest_token(folder, texts):
    assert open_corpus(save_corpus(folder / "corpus.sam", texts)).largest_token == max(chain([-1], *texts))


def test_an_empty_corpus_drafts_nothing(tmp_path):
    path = save_corpus(tmp_path / "empty.sam", [])
    with SuffixIndex(num_speculative_tokens=3, corpus=open_corpus(path)) as index:
        sequence = int32(index.open_sequence(index.open_group(int32())))
        assert (
            index.index_and_draft(sequence, int32(1, 2)[None], int32(0), int32(2), int32(3)).num_draft_tokens[
                0
            ]
            == 0
        )
        index.validate()


def test_many_followers_are_found(tmp_path):
    """More than a page of transitions at the root, in no order."""
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


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "a folder":
        path.unlink()
        path.mkdir()
        return
    if how == "another version":
        content[20:21] = b"7"
    elif how == "another byte order":
        content[22:32] = b"middle\n".ljust(10, b"\0")
    elif how == "foreign":
        content[:8] = b"PK\x03\x04abcd"
    elif how == "empty":
        content.clear()
    elif how == "cut in the header":
        del content[50:]
    elif how == "cut short":
        del content[-1:]
    elif how == "added to":
        content += b"\0"
    elif how == "damaged":
        content[len(content) // 2] ^= 1
    elif how in WRONG_WORDS:
        place, value = WRONG_WORDS[how]
        struct.pack_into("=I", content, CONTENT_OFFSET + place, value)
        content[32:64] = hashlib.sha256(content[CONTENT_OFFSET:]).digest()
    path.write_bytes(content)


# Wrong words under a right checksum, by their place: behind 16 bytes come states of len, link, count, first.
WRONG_WORDS = {
    "a cycle of links": (16 + 5 * 16 + 4, 5),
    "a link beyond the end": (16 + 5 * 16 + 4, 1 << 31),
    "transitions beyond the end": (16 + 5 * 16 + 12, (1 << 32) - 1),
    "a target beyond the end": (16 + 304 * 16 + 4, 1 << 30),
    "a token of no text": (16 + 304 * 16 + 8 * 400, 1 << 30),
}


REFUSALS = {
    "gone": "No such file or directory",
    "a folder": "Is a directory",
    "another version": "of another version of rollout-spec or another byte order: build it again",
    "another byte order": "of another version of rollout-spec or another byte order: build it again",
    "foreign": "not a corpus of rollout-spec",
    "empty": "not a corpus of rollout-spec",
    "cut in the header": "cut short or added to",
    "cut short": "cut short or added to",
    "added to": "cut short or added to",
    "damaged": "damaged, its checksum does not match",
    **dict.fromkeys(WRONG_WORDS, r"damaged before its checksum was made \(corpus: .+\): build it again"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_file_that_is_not_whole_is_refused(path, how):
    damage(path, how)
    with pytest.raises(ConfigError, match=rf"^rollout\.spec\.corpus='{path}': {REFUSALS[how]}"):
        check_corpus(path)
    if how != "damaged" and how not in WRONG_WORDS:
        with pytest.raises(ConfigError, match=REFUSALS[how]):
            make_index(SpecConfig(corpus=str(path)))


def with_right_checksum(path, content):
    """Write a file whose checksum is that of its content, whatever that is."""

    def fill(mapped):
        mapped[CONTENT_OFFSET:] = content

    write_corpus(path, len(content), fill)


@pytest.mark.parametrize(
    ("field", "value", "drafted"),
    [("token", 8, 8), ("token", 31, 9), ("token", 2**32 - 2, 9), ("count", 2, 9)],
)
def test_what_is_wrong_about_a_continuation_leaves_the_groups_own(tmp_path, field, value, drafted):
    """The last one of the corpus is wrong; a sibling goes on with 9 behind the 7, another group with 30."""
    path = save_corpus(tmp_path / "corpus.sam", [range(1, 9)])
    content = np.frombuffer(path.read_bytes(), np.uint32, offset=CONTENT_OFFSET).copy()
    states, transitions = content[4:44].reshape(10, 4), content[44:].reshape(15, 2)
    assert states[8].tolist() == [8, 0, 1, 15] and transitions[14].tolist() == [8, 8]
    if field == "token":
        transitions[14, 0] = value
    else:
        states[8, 2] = value
    with_right_checksum(path, content.tobytes())
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
    with pytest.raises(OSError, match=r"File too large|No space left"):
        write_corpus(path, 1 << 60, lambda mapped: None)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_replaced_stays_with_those_that_have_it_open(path):
    corpus = open_corpus(path)
    before = corpus.mapped[:]
    save_corpus(path, [[1, 2, 3]])
    assert corpus.mapped[:] == before
    assert open_corpus(path).num_tokens == 3


MAPS = """
import re, sys
from rollout_spec.drafting.corpus import open_corpus
corpus = open_corpus(sys.argv[1])
smaps = open("/proc/self/smaps").read()
entry = next(part for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps) if sys.argv[1] in part)
print(entry.split()[1], re.search(r"Rss: +([0-9]+)", entry)[1])
sum(corpus.mapped[::4096])
smaps = open("/proc/self/smaps").read()
entry = next(part for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps) if sys.argv[1] in part)
print(*(sum(map(int, re.findall(kind + ": +([0-9]+)", entry))) for kind in ("Rss", "Shared_[A-Z][a-z]+")))
"""


def test_processes_share_the_pages(tmp_path):
    path = save_corpus(tmp_path / "large.sam", [np.random.default_rng(0).integers(0, 50_000, 100_000)])
    num_kib = path.stat().st_size // 1024
    corpus = open_corpus(path)
    assert sum(corpus.mapped[::4096]) > 0  # this process has them too
    done = subprocess.run([sys.executable, "-c", MAPS, path], capture_output=True, text=True, check=True)
    (permissions, at_first), (rss, shared) = (line.split() for line in done.stdout.splitlines())
    assert permissions == "r--s"
    assert int(at_first) <= 256  # kB: opening reads the header only, the kernel a few pages around it
    assert num_kib - 8 <= int(rss) == int(shared)
    assert num_kib > 3000


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


@pytest.mark.parametrize(
    ("file", "output", "message"),
    [
        ("notes.txt", "corpus.sam", r"notes.txt: it begins with b'plain text\n', which is neither JSON"),
        ("nowhere.jsonl", "corpus.sam", "nowhere.jsonl: No such file or directory"),
        ("good.jsonl", "nowhere/corpus.sam", "nowhere/corpus.sam: must be a file in a folder that exists"),
        ("good.jsonl", ".", "must be a file in a folder that exists"),
        ("empty.jsonl", "corpus.sam", "no token in any response"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_leaves_nothing(tmp_path, capsys, file, output, message):
    write_trace(tmp_path / "good.jsonl", ([1], [[1, 2]]))
    write_trace(tmp_path / "empty.jsonl", ([1], [[]]))
    (tmp_path / "notes.txt").write_text("plain text\n")
    before = set(tmp_path.iterdir())
    assert command("corpus", "build", tmp_path / file, "-o", tmp_path / output) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("rollout-spec corpus build: ") and error.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


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


def test_replay_refuses_a_damaged_corpus(path, tmp_path, capsys):
    damage(path, "damaged")
    trace = write_trace(tmp_path / "trace.jsonl", ([1], [[1, 2]]))
    assert command("replay", trace, "--spec", f"corpus={path}") == 2
    assert capsys.readouterr().err == (
        f"rollout-spec replay: rollout.spec.corpus='{path}': damaged, its checksum does not match\n"
    )
