"""Rollouts as other programs leave them: every form gives the same rollouts, and others are told apart."""

import gzip
import json
import os

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from rollout_spec.cli import main
from rollout_spec.predict import rollout_files
from rollout_spec.predict.rollout_files import read_rollouts
from rollout_spec.predict.row_fields import NAMES
from rollout_spec.trace import TraceError, to_line

WORDS = ["?", "user", "p", "q", "a", "b", "c"]
P, Q, A, B, C = range(2, 7)
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


def found(paths, tokenizer=None, columns=None, limit=None):
    rollouts = list(read_rollouts(paths, tokenizer, columns, limit=limit))
    return [(one.prompt_token_ids.tolist(), [text.tolist() for text in one.responses]) for one in rollouts]


def read_back(folder, rows, tokenizer=None, columns=None):
    (folder / "x.jsonl").write_bytes(rows if isinstance(rows, bytes) else lines(rows))
    return found([folder], tokenizer, columns)


def test_no_file_is_read_beyond_the_last_of_the_first_groups(tmp_path, caplog):
    for step in (1, 2, 10):
        text = "".join(to_line(str(group), step, [step], [[group, 1]]) for group in range(2))
        (tmp_path / f"{step}.jsonl").write_text(text if step < 10 else "no line of a recording\n")
    first = [([step], [[group, 1]]) for step in (1, 2) for group in range(2)]
    for limit in (1, 2, 3, 4):
        assert (found([tmp_path], limit=limit), caplog.messages) == (first[:limit], [])
    assert len(list(read_rollouts([tmp_path], limit=5))) == 4
    assert "left out" in caplog.text


def test_a_limit_reads_a_recording_no_further_and_holds_no_other_rows(tmp_path):
    file = tmp_path / "recording.jsonl"
    file.write_text(to_line("a", 1, [1], [[5, 6]]) * 3 + "no JSON\n" * 2)
    assert len(list(read_rollouts([file], limit=2))) == 2
    with pytest.raises(TraceError, match="4: not JSON"):
        list(read_rollouts([file]))
    rows = [{"prompt_ids": [1 + i % 3], "response_ids": [7, i]} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [known] = read_rollouts([file], limit=1)
    assert [response.tolist() for response in known.responses] == [[7, 0], [7, 3], [7, 6]]
    assert len(list(rollout_files._first(1, rollout_files._read(file, {}), ()))) == 3


GROUPED = [("p q", ["a b", "a c"]), ("q", ["c"])]
FORMS = {
    "verl": [{"input": p, "output": r, "gts": "7", "score": 1.0, "step": 3} for p, r in ROWS],
    "responses in a list": [{"prompt": p, "responses": r, "answer": "7"} for p, r in GROUPED],
    "trl": [{"step": 1, "prompt": p, "completion": r, "advantage": 0.5} for p, r in ROWS],
    "ids": [{"prompt_ids": p, "prompt": "x", "completion_ids": ids} for p, r in WANTED for ids in r],
    "SpecDecode-Bench": [
        {"id": "1", "prompt_token_ids": p, "generated_token_ids": ids, "acc_eagle": [1]}
        for p, r in WANTED
        for ids in r
    ],
    "recorded": [{"group": f"{i}", "prompt_token_ids": p, "responses": r} for i, (p, r) in enumerate(WANTED)],
    "chats": [{"prompt": p, "completion": [{"role": "assistant", "content": r}]} for p, r in ROWS],
}
VERL_ROW = FORMS["verl"][0]
VERL = lines(FORMS["verl"])
NAMED = [{"ask": p, "k": len(p), "said": r} for p, r in ROWS]
BESIDE = [FORMS["verl"][1] | {"said": ["q", "b"]}]
STEPS = [{"prompt": "p", "response": "a", "step": number} for number in range(2)]
CHAT = [{"prompt": [{"role": "user", "content": "p"}], "responses": ["a", "b"]}]  # as verl's data has them


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rollouts(tmp_path, tokenizer, form):
    assert read_back(tmp_path, FORMS[form], tokenizer) == WANTED


@pytest.mark.parametrize(
    ("rows", "columns", "wanted"),
    [
        (CHAT, None, [([1, P], [[A], [B]])]),
        (NAMED, {"prompt": "ask", "response": "said"}, WANTED),
        (BESIDE, {"response": "said"}, [([Q], [[Q], [B]])]),  # which wins against every form
        (BESIDE, {"prompt": "output"}, [([C], [[C]])]),
        (STEPS, None, [([P], [[A]])] * 2),
        (STEPS, {"step": ""}, [([P], [[A], [A]])]),  # which is none of the training
    ],
)
def test_which_columns_are_read(tmp_path, tokenizer, rows, columns, wanted):
    assert read_back(tmp_path, rows, tokenizer, columns) == wanted


@pytest.mark.parametrize("value", ["a", ["b", "b"], [1]], ids=["text", "list", "ids"])
def test_a_reward_function_may_add_any_field_to_verls_rows(tmp_path, tokenizer, value):
    for name in {name for kinds in NAMES.values() for names in kinds for name in names} - set(VERL_ROW):
        assert read_back(tmp_path, [row | {name: value} for row in FORMS["verl"]], tokenizer) == WANTED, name


@pytest.mark.parametrize(
    ("row", "role", "fields"),
    [
        ({"prompt": "p", "response": "a", "output": "b"}, "response", "response or output"),
        ({"prompt": "p", "responses": ["a"], "outputs": ["b"], "completion": "c"}, "response",
         "responses, outputs or completion"),
        ({"problem": "p", "input": "q", "output": "a"}, "prompt", "input or problem"),
        ({"prompt": "p", "response": "a", "step": 1, "global_step": 7}, "step", "step or global_step"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_is_refused_until_a_column_is_named(tmp_path, tokenizer, row, role, fields):
    refusal = rf"x\.jsonl:1: the {role} may be in {fields}: --columns {role}=NAME"
    with pytest.raises(TraceError, match=refusal):
        read_back(tmp_path, [row], tokenizer)
    for name in fields.replace(" or ", ", ").split(", "):
        assert read_back(tmp_path, [row], tokenizer, {role: name})


def test_rows_without_a_response_are_counted(tmp_path, tokenizer, caplog):
    assert read_back(tmp_path, [*FORMS["verl"], {"prompt": "p"}], tokenizer) == WANTED
    assert "x.jsonl: 1 of 4 rows have no response" in caplog.text


def test_gzipped_files_with_a_mark_at_their_begin(tmp_path, tokenizer):
    for content in (VERL, lines(FORMS["recorded"])):
        assert read_back(tmp_path, gzip.compress(b"\xef\xbb\xbf" + content), tokenizer) == WANTED


def test_parquet_whole_and_with_damaged_pages(tmp_path, tokenizer):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    for form in ("responses in a list", "verl"):
        parquet.write_table(arrow.Table.from_pylist(FORMS[form]), file)
        assert found([tmp_path], tokenizer) == WANTED
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(40) + content[44:])
    with pytest.raises(TraceError, match=r"x\.parquet: "):
        found([file])
    parquet.write_table(arrow.table({"response": arrow.array([b"\xff"]).cast("string", safe=False)}), file)
    with pytest.raises(TraceError, match=r"x\.parquet: 'utf-8' codec can't decode"):
        found([file])


THREE = (3, 3.0, "3", "3.0", "step_3", "global_step_3")
SAID = [*((step, 3) for step in THREE), (-1, -1), ("", None), (None, None)]


@pytest.mark.parametrize(("step", "wanted"), SAID)
def test_a_step_is_a_whole_number_and_a_group_may_be_zero(tmp_path, step, wanted):
    rows = [{"gid": i, "prompt_ids": [1], "response_ids": [2], "step": step} for i in (0, 0, 1)]
    (tmp_path / "x.jsonl").write_bytes(lines(rows))
    rollouts = list(read_rollouts([tmp_path], columns={"group": "gid"}))
    expected = [("0", wanted, 2), ("1", wanted, 1)]
    assert [(one.group, one.step, len(one.responses)) for one in rollouts] == expected


@pytest.mark.parametrize("step", [3.5, "last", "3.5", float("inf"), [3], True])
@pytest.mark.parametrize("columns", [{}, {"step": "step"}])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step, columns):
    (tmp_path / "x.jsonl").write_bytes(lines([{"prompt_ids": [1], "response_ids": [2], "step": step}]))
    with pytest.raises(TraceError, match=r"x\.jsonl:1: the step is .*; --columns step= reads no steps"):
        read_rollouts([tmp_path], columns=columns)
    [one] = read_rollouts([tmp_path], columns={"step": ""})
    assert one.step is None


def test_a_prompts_step_in_two_runs_is_said_and_a_file_named_twice_is_read_once(tmp_path, tokenizer, caplog):
    for run in ("off", "sam"):
        (tmp_path / run).mkdir()
        for number, content in enumerate((VERL, VERL.replace(b'"step": 1', b'"step": 2'))):
            (tmp_path / run / f"{number}.jsonl").write_bytes(content)
    (tmp_path / "link").symlink_to("off")
    one = [tmp_path / "off", tmp_path / "link", tmp_path / "off" / "1.jsonl"]
    assert found(one, tokenizer) == found(one[:1], tokenizer)
    assert not caplog.messages
    read_rollouts([tmp_path / "off", tmp_path / "sam"], tokenizer)
    [message] = caplog.messages
    assert "sam/1.jsonl: the runs count as one, and draft from each other's responses" in message


LONG_VERL = lines([row | {"output": f"{row['output']} {'c ' * 9}"} for row in FORMS["verl"]])
ASKED = "a b c " * 4
BEGINS = [[*range(20), 7, 0], [*range(20), 7, 1], [*range(5), 7, 2]]
WITH_PROMPT = [{"gid": i, "prompt_ids": [*range(20)], "response_ids": ids} for i, ids in enumerate(BEGINS)]


def texts(response):
    return lines([{"prompt": ASKED, "response": response.format(i=i), "score": i} for i in range(2)])


RECORDED = to_line("g", 1, [1], [[*range(20)]]).encode()
PADDED = [{"prompt_ids": [1], "response_ids": [2, i] + [0] * 16} for i in range(3)]
WHOLE = [{"prompt_ids": [1], "response_ids": [*range(i, 20)]} for i in range(2)]
TWICE = "rows are there again, the first time in {0}/x.jsonl, then in {0}/"


@pytest.mark.parametrize(
    ("x", "doubt", "options"),
    [
        (LONG_VERL, "", {}),
        (LONG_VERL * 2, f"3 of 6 {TWICE}x.jsonl: each counts", {}),
        (VERL * 2, "", {}),  # short answers are alike by chance
        (RECORDED, f"1 of 2 {TWICE}y.jsonl: each counts", {}),
        (RECORDED, "left out: {0}/y.jsonl is a link to nothing", {}),
        (RECORDED, "--tokenizer: has no effect, because these rollouts are token", {"tokenizer": "nowhere"}),
        (RECORDED, "--columns: has no effect, because recordings have fields", {"columns": {"step": ""}}),
        (lines(PADDED + WHOLE), "3 of 5 responses end in a run of token 0: if that is padding, remove", {}),
        (lines(PADDED[:2] + WHOLE), "", {}),
        (texts("{i} " + "c " * 17), "2 of 2 responses end in a run of 'c ': if that is padding", {}),
        (texts("{i} " + "c " * 9), "", {}),
        (texts(ASKED + "{i}"), "2 of 2 responses begin with their prompt: remove it", {}),
        (lines(WITH_PROMPT), "2 of 3 responses begin with their prompt: remove it", {}),
    ],
)
def test_what_speaks_against_rollouts_is_one_line(tmp_path, tokenizer, caplog, x, doubt, options):
    if "y.jsonl: each" in doubt:
        (tmp_path / "y.jsonl").write_bytes(x)
    elif "a link" in doubt:
        (tmp_path / "y.jsonl").symlink_to("nowhere")
    assert read_back(tmp_path, x, **({"tokenizer": tokenizer} if b"score" in x else options))
    assert [message.startswith(doubt.format(tmp_path)) for message in caplog.messages] == [True] * bool(doubt)


HIDDEN = [["1.jsonl", ".ipynb_checkpoints/1-checkpoint.jsonl"], ["1.jsonl", ".1.jsonl"]]


@pytest.mark.parametrize("files", [["data.parquet/part-0.jsonl"], ["1²3.jsonl"], *HIDDEN])
def test_folders_with_the_name_of_a_file_and_hidden_files(tmp_path, tokenizer, files):
    folder = tmp_path / ".cache"  # what is named may be hidden
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(VERL)
    assert found([folder], tokenizer) == WANTED


@pytest.mark.parametrize(
    "damaged",
    [VERL + b"{\n{}\n", gzip.compress(VERL)[:20] + bytes(50), b"PAR1nothing", b'{"response_ids": [-1]}'],
    ids=["JSON", "gzip", "parquet", "token"],
)
def test_of_a_folder_a_damaged_file_is_left_out(tmp_path, tokenizer, caplog, damaged):
    (tmp_path / "x.jsonl").write_bytes(damaged)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "y.jsonl").write_bytes(VERL)
    assert found([tmp_path], tokenizer) == WANTED
    assert f"left out: {tmp_path / 'x.jsonl'}:" in caplog.text
    (tmp_path / "b" / "y.jsonl").write_text("{}")
    said = r"none of its 2 files holds rollouts: .*y\.jsonl: no response"  # the first of them
    with pytest.raises(TraceError, match=said):
        read_rollouts([tmp_path])


MISTAKES = [
    (b"", "", "x.jsonl: it has no rows; wanted: a recording, verl's rollout_data_dir"),
    (to_line("g", 1, [1], [[], []]).encode(), "", "x.jsonl: no token in any response"),
    (b"%PDF-1.7\n%", "", "x.jsonl:1: not JSON: "),
    (b'{"a": 1, "b": 2}\n{"a": 1}\n', "", "x.jsonl: no response that is known among a, b; wanted: "),
    (b'{"a": "caf\xe9"}\n' + VERL, "", "x.jsonl:1: not JSON: 'utf-8' codec can't decode"),
    (b'{"a": 1' + b"0" * 5000 + b"}\n", "", "x.jsonl:1: not JSON: Exceeds the limit"),
    (VERL + b"[" * 100_000, "", "x.jsonl:4: not JSON: maximum recursion"),
    (gzip.compress(VERL)[:40], "", "x.jsonl:1: Compressed file ended before"),
    (VERL, "", "it holds texts, and drafts are made of tokens: --tokenizer DIR names the policy's"),
    (VERL, "--tokenizer /nowhere", "--tokenizer /nowhere: no such file or folder here, and a name at a hub"),
    (VERL, f"--tokenizer {__file__}", f"--tokenizer {__file__}: no tokenizer.json: "),
    (lines(NAMED), "--columns response=reply", "x.jsonl: no response that is known among ask, k, said; want"),
    (lines(NAMED), "--columns response=said,prompt=q", "--columns prompt=q: a row has the fields ask, k"),
    (lines(NAMED), "--columns reply=said", "--columns reply=said: must be prompt=NAME, response=NAME, gro"),
    (b'[\n {"a": 1}\n]\n', "", "x.jsonl:1: not JSON: Expecting value: line 2 column 1 (char 2). This is"),
    (b'[{"a": 1}]\n', "", "x.jsonl:1: must be a JSON object. This is an array: `jq -c '.[]' FILE`"),
    (b'{\n "a": 1\n}\n', "", "This object has several lines: `jq -c . FILE` writes"),
    (lines([{"response": [{"role": "a", "content": "b"}] * 2}]), "", "x.jsonl:1: the response is a chat of"),
    (lines([{"response": [[["a"]]]}]), "", "x.jsonl:1: the response is [['a']], and not what the policy"),
    (b'{"response": ' + b"[" * 500 + b"]" * 500 + b"}\n", "", "x.jsonl:1: the response is [[[["),
    (lines([{"response": 5}]), "", "x.jsonl:1: the response is 5, and not what the policy wrote"),
    (b'{"prompt_ids": [-1], "responses": [1]}', "", "x.jsonl:1[0]: -1 is not a token id"),
]


@pytest.mark.parametrize(("content", "options", "message"), MISTAKES, ids=[case[2] for case in MISTAKES])
def test_what_cannot_be_read_is_one_line(tmp_path, refused, content, options, message):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    assert message in refused("replay", file, *options.split())


def test_what_is_no_file_is_one_line(tmp_path, refused):
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for reason in ("loop: Too many levels of symbolic links", "pipe: must be a file or a folder, no pipe"):
        assert reason in refused("replay", tmp_path / reason.partition(":")[0])


def test_other_commands_read_the_same(tmp_path, tokenizer, capsys):
    (tmp_path / "1.jsonl").write_bytes(VERL)
    dump = [str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main(["simulate", *dump, "--step-times", "1:0.1", "--batch-thresholds", "4", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["runs"][0]["makespan_s"] == pytest.approx(0.2), "the longest response has two tokens"
    assert main(["corpus", "build", *dump, "-o", str(tmp_path / "c.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 5


def test_a_folder_without_rollouts(tmp_path):
    with pytest.raises(TraceError, match=r"no file in it ends with \.jsonl, .*\.ndjson .* \.gz"):
        read_rollouts([tmp_path])
    (tmp_path / "config.json").write_text('{"seed": 1}')
    with pytest.raises(TraceError, match=r"config\.json: no response that is known among seed"):
        read_rollouts([tmp_path])
    (tmp_path / "x.jsonl").write_text(to_line("g", 1, [1], [[2]]))
    assert found([tmp_path]) == [([1], [[2]])]
    with pytest.raises(TraceError, match=r"config\.json: no response"):  # a file that is named must be one
        read_rollouts([tmp_path / "x.jsonl", tmp_path / "config.json"])
