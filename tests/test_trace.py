"""Recorded rollouts: what is written is read, what a killed run has left of it, and verl's servers record."""

import gzip
import json

import numpy as np
import pytest

from rollout_spec import trace
from rollout_spec.trace import DIR_VARIABLE, TraceError, append_lines, read_trace, to_line, trace_file
from rollout_spec.verl.server_recorder import Recorder
from tests.text import tokens_of

LINES = [to_line("\u00e9", 1, [1, 2], [[3, 4], []], [None, [7, 1, "train"]]), to_line("b", None, [], [[5]])]


def groups(path):
    return [line.group for line in read_trace(path)]


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "trace.jsonl"
    append_lines(file, LINES[:1])
    append_lines(file, ["\n", *LINES[1:]])
    one, other = read_trace(file)
    assert (one.group, one.step, one.names) == ("\u00e9", 1, [None, [7, 1, "train"]])
    assert one.prompt_token_ids.tolist() == [1, 2]
    assert [response.tolist() for response in one.responses] == [[3, 4], []]
    assert (other.group, other.step, other.names) == ("b", None, [])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_last_line_that_is_cut_is_left_out_and_said(tmp_path, pack, caplog):
    file = tmp_path / "trace.jsonl"
    first, last = (line.encode() for line in LINES)
    for length in range(1, len(last) - 1):
        file.write_bytes(pack(first + last[:length]))
        caplog.clear()
        assert groups(file) == ["\u00e9"]
        assert caplog.messages == [f"{file}:2: the last line is cut off, it is left out"]
    caplog.clear()
    file.write_bytes(pack(first + last[:-1]))
    assert groups(file) == ["\u00e9", "b"], "only the end of the line is missing"
    assert not caplog.messages


def test_of_a_compressed_file_that_is_cut_the_whole_lines_are_read(tmp_path, caplog):
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("".join(LINES).encode())[:-8])
    assert groups(file) == ["\u00e9", "b"]
    assert caplog.messages == [f"{file}:3: the rest of the file is cut off, it is left out"]


@pytest.mark.parametrize("num_tokens", [1, 50_000])
def test_a_run_that_goes_on_leaves_no_cut_line_inside(tmp_path, num_tokens):
    file = tmp_path / "trace.jsonl"
    for before in ([], LINES):
        whole, cut = "".join(before), to_line("cut", None, [], [[1] * num_tokens])[:-1]
        file.write_text(whole + cut)
        append_lines(file, LINES[1:])
        assert file.read_text() == whole + LINES[1]


GOOD = {"group": "g", "prompt_token_ids": [], "responses": [[1]]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"group": "g", "responses": [[1]]}', "prompt_token_ids: is missing"),
        ({"group": 1}, "group: must be a string"),
        ({"step": "x"}, "step: must be"),
        ({"prompt_token_ids": 3}, "prompt_token_ids: must be a list"),
        ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids\[1\]: -1 is not"),
        ({"samples": [[{"input": []}]]}, "samples: must be a list of samples.*KeyError"),
        ({"samples": [[{"input": [], "output": 3}]]}, "samples: must be a list of samples"),
        ({"samples": [[{"input": [-1], "output": [3]}]]}, r"responses\[0\]\[0\]: -1 is not"),
        ({"samples": [[]]}, "samples: must be a list of samples"),
        ({"responses": []}, "responses: must be a list of at least one"),
        ({"responses": [[1], [True]]}, r"responses\[1\]\[0\]: True is not"),
        ({"responses": [[1 << 32]]}, r"responses\[0\]\[0\]: 4294967296"),
        ({"responses": [[1], [2]], "names": ["a"]}, "names: must be a list, with a name for each response"),
    ],
)
def test_trace_errors_name_line_and_field(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    second = line if isinstance(line, str) else json.dumps(GOOD | line)
    path.write_text(to_line("g", None, [1], [[2]]) + second + "\n")
    with pytest.raises(TraceError, match=f":2: {message}"):
        list(read_trace(path))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, pack, monkeypatch):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pack(LINES[1].encode() + b"[" + b"1," * (1 << 20)))
    monkeypatch.setattr(trace, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(TraceError, match=r":2: a line must have at most 1 MiB$"):
        list(read_trace(path))


def test_the_trace_is_what_replay_reads(tmp_path, monkeypatch):
    first = {"rollout_spec_group": "first", "rollout_spec_call_tokens": 2}
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "traces"))
    writer = Recorder(replica_rank=1)
    writer.add([1, 2], [3], first)
    writer.add([5], [6, 7], {"rollout_spec_group": "second"})
    # It was interrupted after two tokens, and went on.
    writer.add([1, 2, 4, 4], [5], first | {"rollout_spec_key": [7, 1, "train"]})
    writer.add([5], [], {"rollout_spec_group": "second"})
    # A caller may send anything.
    writer.add(np.array([9]), [1], {"rollout_spec_call_tokens": "all", "rollout_spec_key": b"raw"})
    # A sample of three turns, then one whose context was compressed; they end in any order.
    agent = {"rollout_spec_group": "agents", "rollout_spec_sample": "a"}
    first_turns = (1, [8, 8, 1, 0, 0], [2]), (0, [8, 8], [1])
    for turn, prompt, said in (*first_turns, (2, [8, 8, 1, 0, 0, 2], [3, 4]), (3, [8, 1], [5])):
        writer.add(prompt, said, agent | {"rollout_spec_call": turn})
        writer.flush(step=2)  # a weight sync does not cut a sample that goes on
    writer.end("a")
    writer.flush(step=3)
    writer.flush(step=4)
    lines = list(read_trace(trace_file(tmp_path / "traces", 1)))
    expected = [
        *(([1, 2], [[3], [4, 4, 5]]), ([5], [[6, 7]]), ([9], [[1]])),
        *(([8, 8], [[1, 0, 0, 2, 3, 4]]), ([8, 1], [[5]])),
    ]
    assert lines[3].turns_of(0) == [[0, 1], [3, 4], [4, 6]] and lines[4].turns == []
    steps = [(2 + (prompt[0] == 8), prompt, said) for prompt, said in expected]
    assert [(line.step, *tokens_of(line)) for line in lines] == steps
    assert [line.group for line in lines][:2] == ["first", "second"]
    assert lines[0].names == [None, [7, 1, "train"]] and lines[2].names == ["b'raw'"]
    monkeypatch.delenv(DIR_VARIABLE)
    idle = Recorder(replica_rank=1)
    idle.add([1], [2], {})
    assert not idle._chains, "a run that records nothing keeps nothing"


def test_a_disk_that_cannot_be_written_ends_the_recording_alone(small_disk, monkeypatch, caplog):
    """A full one, and a path that is no folder; inside a weight sync an error would end a training."""
    (small_disk / "file").touch()
    for folder, reason in ((small_disk / "traces", "No space left"), (small_disk / "file", "exists")):
        monkeypatch.setenv(DIR_VARIABLE, str(folder))
        recorder = Recorder(replica_rank=0)
        for step in range(3):
            recorder.add([step], range(20_000), {})
            recorder.flush(step)
        [message] = caplog.messages
        assert reason in message
        caplog.clear()
        assert not recorder._chains
    assert len(list(read_trace(trace_file(small_disk / "traces", 0)))) <= 1, "what was whole is read"
