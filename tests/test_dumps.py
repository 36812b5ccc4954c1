"""Rollouts as other programs leave them: every form gives the same rollouts, and others are told apart."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from rollout_spec.cli import main
from rollout_spec.config import UserError
from rollout_spec.predict import dumps
from rollout_spec.predict.dumps import read_rollouts
from rollout_spec.predict.rows import NAMES
from rollout_spec.trace import TraceError, to_line

WORDS = ["?", "user", "p", "q", "a", "b", "c"]
P, Q, A, B, C = range(2, 7)
CALLED = [0] * 4  # {"name": .., "arguments": ..}, unknown words
ROWS = [("p q", "a b"), ("q", "c"), ("p q", "a c")]
WANTED = [([P, Q], [[A, B], [A, C]]), ([Q], [[C]])]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="? $A", special_tokens=[("?", 0)])  # not in rollouts
    folder = tmp_path_factory.mktemp("policy")
    words.save(str(folder / "tokenizer.json"))
    return folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def found(paths, tokenizer=None, columns=None):
    rollouts = list(read_rollouts(paths, tokenizer, columns))
    return [(one.prompt_token_ids.tolist(), [text.tolist() for text in one.responses]) for one in rollouts]


def said(text):
    return {"role": "assistant", "content": text}


def asked(text):
    return {"role": "user", "content": text}


def choice(text):
    return {"index": 0, "message": said(text), "finish_reason": "stop"}


GROUPED = [("p q", ["a b", "a c"]), ("q", ["c"])]
FORMS = {
    "verl": [{"input": p, "output": r, "gts": "7", "score": 1.0, "step": 3} for p, r in ROWS],
    "responses in a list": [{"prompt": p, "responses": r, "answer": "7"} for p, r in GROUPED],
    "maths evaluations": [{"idx": 1, "question": p, "code": r, "pred": ["7"]} for p, r in GROUPED],
    "lm-eval": [
        {"doc_id": 1, "doc": {"x": "y"}, "arguments": {"gen_args_0": {"arg_0": p, "arg_1": {}}}, "resps": [r]}
        for p, r in GROUPED
    ],
    "trl": [{"step": 1, "prompt": p, "completion": r, "advantage": 0.5} for p, r in ROWS],
    "outputs with token ids": [
        {"prompt_token_ids": p, "outputs": [{"text": "x", "token_ids": ids} for ids in r]} for p, r in WANTED
    ],
    "SGLang": [
        {"prompt": p, "output": [{"text": one, "meta_info": {"id": "x"}} for one in r]} for p, r in GROUPED
    ],
    "SkyRL": [
        {"input_prompt": p, "output_response": r, "score": [0, 1.0], "stop_reason": "a"} for p, r in ROWS
    ],
    "LiveCodeBench": [{"question_content": p, "output_list": r, "code_list": ["a"]} for p, r in GROUPED],
    "answers of named models": [
        {"question": p, "responses": [{"response_model": "b", "response": one} for one in r]}
        for p, r in GROUPED
    ],
    "ids in columns": [
        {"prompt_ids": p, "prompt": "x", "completion_ids": ids} for p, r in WANTED for ids in r
    ],
    "a recording": [
        {"group": str(i), "prompt_token_ids": p, "responses": r} for i, (p, r) in enumerate(WANTED)
    ],
}
VERL_ROW = FORMS["verl"][0]
VERL = lines(FORMS["verl"])
CHATS = ("messages", "conversations", "trajectory")
NAMED = [{"row": {"ask": p, "k": len(p)}, "said": r} for p, r in ROWS]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rollouts(tmp_path, tokenizer, form):
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(FORMS[form]))
    assert found([file], tokenizer) == WANTED


@pytest.mark.parametrize("value", ["a", ["b", "b"], [asked("b"), said("b")]], ids=["text", "list", "chat"])
def test_a_reward_function_may_add_any_field_to_verls_rows(tmp_path, tokenizer, value):
    for name in {*itertools.chain(*NAMES.values()), *CHATS} - set(VERL_ROW):
        (tmp_path / "x.jsonl").write_bytes(lines(row | {name: value} for row in FORMS["verl"]))
        assert found([tmp_path], tokenizer) == WANTED, name


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        # A chat holds one of several responses, or all of one; a response that the policy's last message is.
        ({"problem": "p", "generations": ["a", "b"], "messages": [asked("p"), said("a")]}, ([P], [[A], [B]])),
        ({"response": "b", "messages": [asked("p"), said("a"), asked("q"), said("b")]}, ([1, P], [[A, B]])),
        # A prompt that holds the question; the same twice; token ids and their text.
        ({"question": "p", "prompt": "q p", "response": "a"}, ([Q, P], [[A]])),
        ({"prompt": "p", "response": "a", "output": "a", "global_step": 3, "step": 3}, ([P], [[A]])),
        ({"prompt": "p", "response": "b", "response_ids": [A], "prompt_ids": [Q]}, ([Q], [[A]])),
        # Neither a response nor a field with what is no text.
        ({"prompt": "p", "response": "a", "code": 1.0, "outputs": {"passed": True}}, ([P], [[A]])),
    ],
)
def test_what_fields_have_in_common_is_no_doubt(tmp_path, tokenizer, row, wanted):
    (tmp_path / "x.jsonl").write_bytes(lines([row]))
    assert found([tmp_path], tokenizer) == [wanted]


@pytest.mark.parametrize(
    ("row", "role", "fields"),
    [
        ({"prompt": "p", "response": "a", "code": "b"}, "response", "response or code"),
        (
            {"prompt": "p", "responses": ["a"], "outputs": ["b"], "code": "c"},
            "response",
            "responses, outputs or code",
        ),
        ({"messages": [asked("p"), said("a")], "completion": "b"}, "response", "messages or completion"),
        ({"instruction": "p", "input": "q", "output": "a"}, "prompt", "input or instruction"),
        ({"prompt": "p", "response": "a", "step": 1, "global_step": 7}, "step", "step or global_step"),
        ({"response": "a", "task_id": "x", "id": 3}, "group", "task_id or id"),
    ],
)
def test_what_stays_ambiguous_is_refused_until_a_column_is_named(tmp_path, tokenizer, row, role, fields):
    (tmp_path / "x.jsonl").write_bytes(lines([row]))
    with pytest.raises(
        TraceError, match=rf"x\.jsonl:1: the {role} may be in {fields}, .*--columns {role}=NAME"
    ):
        read_rollouts([tmp_path], tokenizer)
    for name in fields.replace(" or ", ", ").split(", "):
        assert list(read_rollouts([tmp_path], tokenizer, {role: name}))


def test_a_named_column_wins_against_every_form(tmp_path, tokenizer):
    more = {"response": "b", "messages": [asked("p"), said("c")], "generations": ["q", "b"]}
    (tmp_path / "x.jsonl").write_bytes(lines([FORMS["verl"][1] | more]))
    for name, wanted in (("response", [[B]]), ("generations", [[Q], [B]]), ("output", [[C]])):
        assert found([tmp_path], tokenizer, {"response": name}) == [([Q], wanted)]
    assert found([tmp_path], tokenizer, {"response": "messages"}) == [([Q], [[C]])], "verl's prompt"
    assert found([tmp_path], tokenizer, {"prompt": "response"}) == [([B], [[C]])]


def responses_api(*items):
    """A body of OpenAI's Responses API: its `text` is a setting."""
    settings = {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "instructions": None}
    return {"object": "response", "error": None, "output": list(items), **settings}


THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}
SILENT = {"type": "reasoning", "summary": []}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize("columns", [None, {"response": "response.body.output"}])
@pytest.mark.parametrize(
    ("items", "tokens"),
    [([SILENT, MESSAGE], [A]), ([THOUGHT, MESSAGE, CALL], [B, A, *CALLED]), ([MESSAGE, MESSAGE], [A, A])],
)
def test_the_items_of_the_responses_api_are_one_response(tmp_path, tokenizer, caplog, columns, items, tokens):
    bodies = {"x": responses_api(*items), "y": responses_api(SILENT)}
    rows = [{"custom_id": name, "response": {"body": body}, "error": None} for name, body in bodies.items()]
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    assert found([tmp_path], tokenizer, columns) == [([], [tokens])]
    assert "1 of 2 rows have no response" in caplog.text, "it only thought"


def test_what_is_inside_a_prompt_without_an_answer_is_no_rollout(tmp_path, tokenizer):
    tests = {"ground_truth": {"inputs": ["p"], "outputs": ["a"]}}
    (tmp_path / "x.json").write_text(json.dumps({"prompt": [asked("p")], "reward_model": tests}))
    with pytest.raises(TraceError, match="no response that is known among prompt, reward_model"):
        read_rollouts([tmp_path], tokenizer)
    attempts = [{"messages": [asked("p"), said("a")]}, {"messages": [asked("p"), said("b")]}]
    (tmp_path / "x.json").write_text(json.dumps({"problem": "p", "attempts": attempts}))
    assert found([tmp_path], tokenizer) == [([1, P], [[A], [B]])]
    (tmp_path / "x.json").write_text(json.dumps({"outputs": FORMS["verl"]}))
    assert found([tmp_path], tokenizer) == WANTED, "rows of their own, not the samples of one prompt"


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b"", "it begins with b'.x00"),
        (b'{"a": "', "a line is longer than 1 MiB: write JSON lines"),
        (b"{\n" + (b" " * 999 + b"\n") * 1100, "its one JSON document is longer than 1 MiB"),
    ],
)
def test_no_more_is_read_of_a_file_than_says_that_it_is_none(tmp_path, monkeypatch, begin, message):
    monkeypatch.setattr(dumps, "MAX_JSON_BYTES", 1 << 20)
    file = tmp_path / "x.jsonl"
    file.write_bytes(begin)
    os.truncate(file, 16 << 20)  # filled with zeros
    tracemalloc.start()
    with pytest.raises(TraceError, match=rf"x\.jsonl: {message}"):
        read_rollouts([file])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 5 << 20


@pytest.mark.parametrize("wrap", [list, lambda rows: {"info": 1, "sets": [{"results": rows}]}])
def test_one_document_holds_rows_too(tmp_path, tokenizer, wrap):
    file = tmp_path / "x.json"
    for indent in (None, 2):
        file.write_text(json.dumps(wrap(FORMS["verl"]), indent=indent))
        assert found([file], tokenizer) == WANTED


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_with_a_mark_at_their_begin(tmp_path, tokenizer, pack):
    file = tmp_path / "x"
    for content in (VERL, lines(FORMS["a recording"]), json.dumps(FORMS["verl"], indent=1).encode()):
        file.write_bytes(pack(b"\xef\xbb\xbf" + content))
        assert found([file], tokenizer) == WANTED


def test_parquet_whole_and_with_damaged_pages(tmp_path, tokenizer):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    for form in ("outputs with token ids", "verl"):
        parquet.write_table(arrow.Table.from_pylist(FORMS[form]), file)
        assert found([tmp_path], tokenizer) == WANTED
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(40) + content[44:])
    with pytest.raises(TraceError, match=r"x\.parquet: "):
        found([file])
    parquet.write_table(arrow.table({"response": arrow.array([b"\xff"]).cast("string", safe=False)}), file)
    with pytest.raises(TraceError, match=r"x\.parquet: 'utf-8' codec can't decode"):
        found([file])


def test_zstd(tmp_path, tokenizer):
    arrow = pytest.importorskip("pyarrow")
    packed = arrow.compress(lines(FORMS["verl"]), codec="zstd", asbytes=True)
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    assert found([tmp_path], tokenizer) == WANTED
    (tmp_path / "x.jsonl.zst").write_bytes(packed[:-5])
    with pytest.raises(TraceError, match=r"x\.jsonl\.zst: Truncated"):
        found([tmp_path])


@pytest.fixture
def piped():
    """The path of a pipe that holds a content."""
    readers = []

    def put(content):
        reader, writer = os.pipe()
        readers.append(reader)
        with open(writer, "wb") as pipe:
            pipe.write(content)
        return Path(f"/dev/fd/{reader}")

    yield put
    for reader in readers:
        os.close(reader)


def test_a_pipe(tokenizer, piped):
    assert found([piped(gzip.compress(VERL))], tokenizer) == WANTED
    with pytest.raises(TraceError, match=r"/dev/fd/\d+: parquet cannot be read from a pipe$"):
        found([piped(b"PAR1")])


def test_chats_are_siblings_by_their_first_messages(tmp_path, tokenizer):
    call = {"function": {"name": "a", "arguments": '"b"'}}
    turns = [asked("p"), said("a") | {"tool_calls": [call]}, {"role": "tool", "content": "q"}, said("b")]
    chats = [{"messages": turns}, {"messages": [asked("p"), said("c")]}, {"messages": [asked("p")]}]
    old = {"conversations": [{"from": "user", "value": "p"}, {"from": "gpt", "value": "b"}]}
    bare = [asked("p"), said("a")]  # no field around it
    (tmp_path / "x.jsonl").write_bytes(lines([None, *chats, old, bare, None]))
    assert found([tmp_path], tokenizer) == [([1, P], [[A, *CALLED, B], [C], [B], [A]])]


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"reasoning": "b"}, [B, A]),
        ({"reasoning_content": "b", "reasoning": "c"}, [B, A]),
        ({"reasoning_content": None, "reasoning": "b"}, [B, A]),
        ({"reasoning": {"effort": "high"}}, [A]),
        ({"tool_calls": "b c"}, [A, B, C]),
        ({"tool_calls": ["b", None, 3, ["c"]]}, [A, B]),
        ({"tool_calls": 3}, [A]),
        ({"tool_calls": {"name": "f", "arguments": {}}}, [A, *CALLED]),
        ({"tool_calls": [{"function": "f"}]}, [A, *CALLED]),
    ],
)
def test_what_a_message_has_beside_its_content(tmp_path, tokenizer, more, tokens):
    (tmp_path / "x.jsonl").write_bytes(lines([{"messages": [asked("p"), said("a") | more]}]))
    assert found([tmp_path], tokenizer) == [([1, P], [tokens])]


def test_several_chats_in_a_column(tmp_path, tokenizer):
    """As TRL has conversations, and verifiers."""
    rows = [{"prompt": [asked("p")], "completion": [said("a"), asked("q"), said("b")]}]
    rows += [{"messages": [asked("p")], "responses": [said("a"), said("c")]}]
    rows += [{"messages": [asked("p"), said("b")], "response": "b"}]
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    assert found([tmp_path], tokenizer) == [([1, P], [[A, B], [A], [C], [B]])]


def test_batch_outputs_have_several_choices_and_no_prompt(tmp_path, tokenizer, caplog):
    rows = [
        {"custom_id": "x", "response": {"body": {"choices": [choice("a b"), choice("c")]}}, "error": None},
        {"custom_id": "y", "response": None, "error": {"code": 500}},
        {"custom_id": "x", "response": {"body": {"choices": [{"text": "b"}]}}, "error": None},
    ]
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    assert found([tmp_path], tokenizer) == [([], [[A, B], [C], [B]])]
    assert "x.jsonl: 1 of 3 rows have no response" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        {"response": None, "error": {"code": "batch_expired", "message": "a"}},
        {"response": {"status_code": 400, "body": None}, "error": {"object": "error", "message": "a"}},
        {"response": {"status_code": 200, "body": None}, "error": None},
        {"response": {"status_code": 500, "body": {"message": "a"}}, "error": None},
        {"response": {"body": {"error": {"message": "a"}}}, "error": None},
        {"response": {"body": {"object": "error", "message": "a", "code": "b"}}, "error": None},
    ],
)
def test_an_error_of_batch_outputs_is_no_response(tmp_path, tokenizer, caplog, answer):
    body = {"choices": [choice("b")], "error": None}
    rows = [{"custom_id": "x", "response": {"status_code": 200, "body": body}, "error": None}]
    (tmp_path / "x.jsonl").write_bytes(lines([*rows, {"custom_id": "y"} | answer]))
    assert found([tmp_path], tokenizer) == [([], [[B]])]
    assert "x.jsonl: 1 of 2 rows have no response" in caplog.text


def test_columns_are_named(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_bytes(lines(NAMED))
    columns = {"prompt": "row.ask", "response": "said"}
    assert found([tmp_path], tokenizer, columns) == WANTED
    everything = list(read_rollouts([tmp_path], tokenizer, columns | {"step": "row.k", "group": "row.k"}))
    assert [(one.group, one.step) for one in everything] == [("3", 3), ("1", 1)]
    (tmp_path / "y.jsonl").write_text('{"said": "a"}')
    with pytest.raises(UserError, match=r"--columns prompt=row\.ask: a row has the fields said"):
        read_rollouts([tmp_path], tokenizer, columns)


def test_a_step_may_be_none_of_the_training(tmp_path, tokenizer):
    rows = [{"prompt": "p", "response": "a", "step": number} for number in range(2)]
    (tmp_path / "x.json").write_text(json.dumps({"runs": rows}))
    assert found([tmp_path], tokenizer) == [([P], [[A]])] * 2
    assert found([tmp_path], tokenizer, {"step": ""}) == [([P], [[A], [A]])]


@pytest.mark.parametrize(
    ("step", "wanted"), [(3, 3), (3.0, 3), ("3", 3), ("last", None), ("9" * 5000, None), (None, None)]
)
def test_a_step_is_a_number_or_its_digits_and_a_group_may_be_zero(tmp_path, step, wanted):
    rows = [{"gid": i, "prompt_ids": [1], "response_ids": [2], "step": step} for i in (0, 0, 1)]
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    rollouts = list(read_rollouts([tmp_path], columns={"group": "gid"}))
    assert [(one.group, one.step, len(one.responses)) for one in rollouts] == [
        ("0", wanted, 2),
        ("1", wanted, 1),
    ]


def test_steps_and_prompts_of_a_verl_run(tmp_path, tokenizer):
    """A file a step; verl 0.9.1 says in `uid` whose samples they are, which images may need."""
    for step in (10, 2):
        uids = [f"{name}_{number}_0" for name in "uv" for number in range(2)]
        rows = [{"input": "p", "output": "a", "score": 1, "step": step, "uid": uid} for uid in uids]
        (tmp_path / f"{step}.jsonl").write_bytes(lines(rows))
    rollouts = list(read_rollouts([tmp_path], tokenizer))
    assert [(one.step, len(one.responses)) for one in rollouts] == [(2, 2), (2, 2), (10, 2), (10, 2)]
    assert len({one.group for one in rollouts}) == 1, "the prompt comes back"


@pytest.mark.parametrize(
    "files",
    [
        ["data.parquet/part-0.jsonl"],
        ["1.jsonl", ".ipynb_checkpoints/1-checkpoint.jsonl"],
        ["1.jsonl", ".1.jsonl"],
    ],
)
def test_folders_with_the_name_of_a_file_and_hidden_files(tmp_path, tokenizer, files):
    folder = tmp_path / ".cache"  # what is named may be hidden
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(VERL)
    assert found([folder], tokenizer) == WANTED


@pytest.mark.parametrize(
    "damaged",
    [VERL + b"{\n{}\n", bz2.compress(VERL)[:9] + bytes(50), b"PAR1nothing"],
    ids=["JSON", "bzip2", "parquet"],
)
def test_of_a_folder_a_damaged_file_is_left_out(tmp_path, tokenizer, caplog, damaged):
    (tmp_path / "x.jsonl").write_bytes(damaged)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "y.jsonl").write_bytes(VERL)
    assert found([tmp_path], tokenizer) == WANTED
    assert f"left out: {tmp_path / 'x.jsonl'}:" in caplog.text
    (tmp_path / "b" / "y.jsonl").write_text("{}")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(TraceError, match=r"x\.jsonl:"):  # of all that is there, what went wrong
        read_rollouts([tmp_path])


def test_what_a_killed_run_has_cut_is_left_out(tmp_path, tokenizer, caplog):
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(FORMS["verl"])[:-9])
    assert found([file], tokenizer) == [([P, Q], [[A, B]]), ([Q], [[C]])]
    assert caplog.messages == [f"{file}:3: the last line is cut off, it is left out"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_of_a_compressed_file_that_was_cut_the_lines_before_count(tmp_path, tokenizer, caplog, pack):
    file = tmp_path / "x.jsonl"
    packed = pack(VERL)
    file.write_bytes(packed + packed[:12])
    assert found([file], tokenizer) == WANTED
    [message] = caplog.messages
    assert f"{file}: Compressed file ended" in message and "what follows is left out" in message


texts = st.lists(st.sampled_from(WORDS[1:]), min_size=1, max_size=4).map(" ".join)


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.tuples(st.integers(0, 2), texts, texts), min_size=1), data=st.data())
def test_what_verl_writes_is_read_whatever_the_order(tmp_path_factory, tokenizer, rows, data):
    folder = tmp_path_factory.mktemp("dump")
    for step in {step for step, _, _ in rows}:
        of_step = data.draw(st.permutations([row[1:] for row in rows if row[0] == step]))
        entries = [{"input": p, "output": r, "gts": None, "score": 0.0, "step": step} for p, r in of_step]
        (folder / f"{step}.jsonl").write_bytes(lines(entries))
    read = [
        (one.step, *(" ".join(WORDS[i] for i in text) for text in (one.prompt_token_ids, response)))
        for one in read_rollouts([folder], tokenizer)
        for response in one.responses
    ]
    assert sorted(read) == sorted(rows)
    assert [step for step, _, _ in read] == sorted(step for step, _, _ in rows)


DEEP, NESTED = b"[" * 100_000, b"[" * 700 + b"]" * 700
MISTAKES = [
    (b"", "", "x.jsonl: it has no rows; wanted: a recording, verl's rollout_data_dir"),
    (b"\xef\xbb\xbf\n \n", "", "x.jsonl: it has no rows; wanted: a recording"),
    (to_line("g", 1, [1], [[], []]).encode(), "", "x.jsonl: no token in any response"),
    (b"%PDF-1.7\n%", "", "x.jsonl: it begins with b'%PDF-1.7\\n%', which is neither JSON nor parquet; wa"),
    (b"PAR1nothing", "", "x.jsonl: "),
    (b'{"a": 1, "b": 2}\n{"a": 1}\n', "", "x.jsonl: no response that is known among a, b; wanted: "),
    (b"[1, 2]", "", "x.jsonl: no response that is known among [1, 2]; wanted: "),
    (b'{"a": "caf\xe9"}\n' + VERL, "", "x.jsonl:1: not JSON: 'utf-8' codec can't decode"),
    (b'[\n"caf\xe9"]', "", "x.jsonl:2: not JSON: 'utf-8' codec can't decode"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "", "x.jsonl:1: not JSON: Exceeds the limit"),
    (DEEP, "", "x.jsonl:1: not JSON: maximum recursion"),
    (b"[\n" + DEEP, "", "x.jsonl: not JSON: maximum recursion"),
    (VERL + DEEP, "", "x.jsonl:4: not JSON: maximum recursion"),
    (VERL + b'{"messages": [{"from": "gpt", "value": ' + NESTED + b"}]}", "", "x.jsonl:4: maximum recursion"),
    (VERL + b'{"output": "a", "step": 1e400}', "", "x.jsonl:4: step: cannot convert float infinity"),
    (gzip.compress(VERL)[:40], "", "x.jsonl: Compressed file ended before"),
    (bz2.compress(VERL)[:9] + bytes(50), "", "x.jsonl: Invalid data stream"),
    (VERL, "", "it holds texts, and drafts are made of tokens: --tokenizer DIR names the policy's"),
    (VERL, "--tokenizer /nowhere", "--tokenizer /nowhere: no such file; where a folder has none"),
    (VERL, f"--tokenizer {__file__}", f"--tokenizer {__file__}: no tokenizer.json: "),
    (VERL + b"{\n{}\n", "", "x.jsonl:4: not JSON: "),
    (lines(NAMED), "--columns response=reply", "x.jsonl: no response that is known among row, said; wanted"),
    (
        lines(NAMED),
        "--columns response=said,prompt=ask",
        "--columns prompt=ask: a row has the fields row, said",
    ),
    (lines(NAMED), "--columns reply=said", "--columns reply=said: must be prompt=NAME, response=NAME, gro"),
    (lines(NAMED), "--columns prompt", "--columns prompt: must be prompt=NAME, response=NAME, gro"),
    (b'{"prompt_ids": [-1], "responses": [1]}', "", "x.jsonl[0]: -1 is not a token id"),
]


@pytest.mark.parametrize(("content", "options", "message"), MISTAKES, ids=[case[2] for case in MISTAKES])
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, content, options, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    assert main(["replay", str(file), *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollout-spec replay: ") and error.count("\n") == 1
    assert message in error


def test_other_commands_read_the_same(tmp_path, tokenizer, capsys):
    (tmp_path / "1.jsonl").write_bytes(VERL)
    dump = [str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main(["simulate", *dump, "--step-times", "1:0.1", "--batch-thresholds", "4", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["runs"][0]["makespan_s"] == pytest.approx(0.2), "the longest response has two tokens"
    assert main(["corpus", "build", *dump, "-o", str(tmp_path / "c.sam"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 5


def test_a_stranger_needs_one_command(tmp_path, tokenizer, capsys):
    dump, output = tmp_path / "dump", tmp_path / "output"
    dump.mkdir()
    rows = [{"input": "p q", "output": text, "score": 1.0, "step": 1} for text in ("a b c", "a b c")]
    (dump / "1.jsonl").write_bytes(lines(rows))
    assert main(["replay", str(dump), "--tokenizer", str(tokenizer), "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Drafts would change nothing: ") and f"page: {output / 'replay.html'}" in out


def test_a_folder_without_rollouts(tmp_path):
    with pytest.raises(TraceError, match=r"no file in it ends with \.jsonl, .*\.ndjson .* \.gz, \.bz2"):
        read_rollouts([tmp_path])
    (tmp_path / "config.json").write_text('{"seed": 1}')
    with pytest.raises(TraceError, match=r"config\.json: no response that is known among seed"):
        read_rollouts([tmp_path])
    (tmp_path / "x.jsonl").write_text(to_line("g", 1, [1], [[2]]))
    assert found([tmp_path]) == [([1], [[2]])]
    with pytest.raises(TraceError, match=r"config\.json: no response"):  # a file that is named must be one
        read_rollouts([tmp_path / "x.jsonl", tmp_path / "config.json"])
