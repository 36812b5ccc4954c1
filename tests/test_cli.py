"""The command line as a user meets it: exit codes, one-line errors, JSON, and nothing left running."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollout_spec.cli import COMMANDS, build_parser, main
from rollout_spec.doctor import diagnosis
from rollout_spec.trace import to_line
from tests.distributions import check_parser, parsers

FOLDER = Path(__file__).parent
TRACE = str(FOLDER / "data/demo_trace.jsonl.gz")
FILES = {"TRACE": TRACE, "HERE": __file__}


def test_help_lists_every_command_and_imports_nothing_slow():
    code = (
        "import sys; from rollout_spec.cli import build_parser; print(build_parser().format_help());"
        "slow = {'numpy', 'rich', 'torch', 'vllm', 'verl', 'ray', 'pandas'} & set(sys.modules);"
        "sys.exit(f'imported: {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s", done.stdout, re.MULTILINE)


# Arguments as a user types them; what stands in braces is one of FILES.
MISTAKES = [
    ("compare /nowhere /nowhere", "/nowhere: no such file"),
    ("compare '' {TRACE}", "RUN_OFF: must name a file or a folder"),
    ("compare {TRACE} {TRACE}", "not a line of verl's file logger"),
    ("certify", "the following arguments are required: --model"),
    ("certify --model /nowhere", "--model /nowhere: no Hugging Face folder"),
    ("certify --model x --train-file /nowhere", "--train-file /nowhere: no such file"),
    ("certify --model x --train-file {HERE}", "--train-file {HERE}: cannot be read as parquet"),
    ("certify --model x --num-prompts 9", "--num-prompts 9: at most 8 without --train-file"),
    ("certify --model x --top-k -5", "--top-k: -5 must be at least 0"),
    ("certify --model x --top-p 0", "--top-p: 0 must be above 0 and at most 1"),
    ("certify --model x --temperatures 1 nan", "--temperatures: nan must be at least 0"),
    ("certify --model x --seed 2147483647", "--seed: 2147483647 must be at least 0 and at most 2,147"),
    ("certify --model x --dtype int8", "--dtype: invalid choice: 'int8'"),
    ("certify --model x --group-sizes two", "--group-sizes: invalid int value: 'two'"),
    ("certify --model x --num-speculative-tokens 8 4 --model-drafter mtp::5", "that it drafts, 1 to 4"),
    ("replay ''", "FILE_OR_FOLDER: must name a file or a folder"),
    ("replay /nowhere.jsonl", "/nowhere.jsonl"),
    ("replay {TRACE} --num-speculative-tokens 0", "num_speculative_tokens=0: must be between"),
    ("replay {TRACE} --spec routing=group", "--spec routing=group: it makes no difference in replay"),
    ("replay {TRACE} --spec model_tokens=1", "--spec model_tokens=1: --model-acceptance sets it"),
    *(
        (f"replay {{TRACE}} --model-acceptance '{given}'", f"--model-acceptance {given}: must be numbers")
        for given in ("", "1.1", "0.8;0.7", "0.5,", ",".join(["0.5"] * 65))
    ),
    ("replay {TRACE} --history 0", "--history: use --spec history=0"),
    ("replay {TRACE} --batch-threshold 8", "--batch-threshold: replay drafts in every step"),
    ("replay {TRACE} --depth 3", "unrecognized arguments: --depth 3"),
    ("replay {TRACE} --limit-groups 99999999999999999999", "must be at least 1 and at most 2,147,483,647"),
    ("replay {TRACE} --replicas 99999999", "--replicas: 99999999 must be at least 1 and at most 128"),
    ("simulate {TRACE} --step-times 1:0.1 --batch-thresholds=--5", "batch_threshold='--5': must be a number"),
    (f"simulate {{TRACE}} --step-times {',1:' * 999}", "neither a file nor tokens:seconds"),
    ("replay {TRACE} --spec history=" + "[" * 100_000, "rollout.spec.history="),
    ("simulate --step-times 1:0.1,2:0.1 --replicas 1 2 {TRACE}", "'{TRACE}'; name files before options that"),
    ("simulate --step-times 1:0.1,2:0.1 --batch-thresholds 8 {TRACE}", "FILE_OR_FOLDER; name files before"),
    ("simulate {TRACE}", "--step-times: must say how long a step takes"),
    *(
        (f"simulate {{TRACE}} --limit-groups 2 --step-times 1:0.1 {options}", message)
        for options, message in (
            ("--batch-thresholds few", "rollout.spec.batch_threshold='few': must be a number or auto"),
            ("--spec model_tokens=1", "--spec model_tokens=1: no model drafts here"),
            ("--spec corpus", "--spec corpus: must be NAME=VALUE"),
            ("--spec corpus=2024", "corpus='2024': No such file"),
            ("--spec corpus={TRACE} --copies 2", "--copies 2: copies have tokens of their own"),
            ("--tool-seconds 1", "--tool-seconds: no response of {TRACE} has several turns"),
            ("--group-size 4 9", "--group-size 9: no line of {TRACE} has more than 8 responses"),
            ("--spec history=8", "--spec history: no group of {TRACE} comes back in a later training step"),
        )
    ),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_users_mistake_is_one_line_and_exit_code_2(line, message, refused):
    assert message.format(**FILES) in refused(*shlex.split(line.format(**FILES)))


PARSERS = dict(parsers(build_parser()))


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_groups_for_its_arguments_and_one_example(name):
    check_parser(name, PARSERS[name], build_parser())


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["simulate", "--step-times", "1:0.1", "--group-size", "1"], [[[], [2]]]),
        (["replay", "--limit-groups", "1"], [[[]], [[2, 3]]]),
    ],
)
def test_first_responses_without_a_token_are_a_mistake(options, lines, tmp_path, refused):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(to_line("a", None, [1], responses) for responses in lines))
    said = f"rollout-spec {options[0]}: {trace}: no token in any response"
    assert refused(options[0], trace, *options[1:]) == said


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch, capsys):
    """And is no answer: 1 would mean "no"."""
    monkeypatch.setattr(diagnosis, "diagnose", lambda: 1 / 0)
    assert main(["doctor"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_simulate_compares_thresholds_on_clusters(capsys, monkeypatch):
    def printed(*arguments):
        assert main(["simulate", TRACE, "--step-times", *arguments]) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")  # as wide as a file
    command = "1:0.02,64:0.021,256:0.04", "--max-num-seqs", "4", "--batch-thresholds", "2", "auto"
    one, two = json.loads(printed(*command, "--replicas", "1", "2", "--json"))["results"]
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert [run["batch_threshold"] for run in one["runs"]] == ["off", 2, "auto"]
    assert [run["drafter"] for run in one["runs"]] == ["off", "sam", "sam"]
    assert one["runs"][0]["makespan_s"] > two["runs"][0]["makespan_s"]
    speedup = max(run["speedup"] for run in one["runs"])
    assert speedup > 1.1
    shown = printed(*command)
    assert "sam *" in shown
    assert shown.startswith(f"Drafts would make these rollouts {speedup:.2f} times as fast, with batch_thr")
    shown = printed("1:1,2:1000", "--limit-groups", "1")
    assert shown.startswith("Drafts would save no time here.\n"), "a second token costs too much"


@pytest.mark.parametrize("command", ["replay no.jsonl", "compare no no", "certify --model no"])
def test_an_output_that_cannot_be_is_refused_first(command, monkeypatch, tmp_path, refused):
    (closed := tmp_path / "closed").mkdir()
    (dangling := tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0 or path != closed)  # as of root
    for output, fault in (
        (__file__, f"{__file__} is no folder"),
        (f"{__file__}/deep/er", f"{__file__} is no folder"),
        (dangling, f"{dangling} is no folder"),
        (closed, f"{closed} cannot be written"),
        (closed / "deep" / "er", f"{closed} cannot be written"),
    ):
        said = refused(*command.split(), "--output", output)
        assert said == f"rollout-spec {command.split()[0]}: --output: {fault}"
    assert "--output" not in refused(*command.split(), "--output", tmp_path / "new" / "deep")


FULL = """
import pathlib, sys
write = pathlib.Path.write_bytes
def full(path, content):
    if path.name.startswith(".replay.html"):
        raise OSError(28, "No space left on device")
    return write(path, content)
pathlib.Path.write_bytes = full
from rollout_spec.cli import main
sys.exit(main(sys.argv[1:]))
"""
RUN = "import sys; from rollout_spec.cli import main; sys.exit(main(sys.argv[1:]))"


def run_python(code, *arguments, **settings):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, **settings)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_disk_that_is_full_leaves_the_old_files_and_the_figures(tmp_path, more):
    (tmp_path / "replay.json").write_text(before := '{"made_by": "rollout_spec"}')
    arguments = ("replay", TRACE, "--limit-groups", 2, "--output", tmp_path, *more)
    done = run_python(FULL, *arguments, stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == f"rollout-spec replay: {tmp_path}/replay.html: No space left on device\n"
    assert [file.name for file in tmp_path.iterdir()] == ["replay.json"]
    assert (tmp_path / "replay.json").read_text() == before
    assert "tokens_per_step" in done.stdout if more else "tokens per step" in done.stdout


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_has_gone_is_exit_code_141_and_files_are_written(more, tmp_path):
    read, write = os.pipe()
    os.close(read)
    arguments = ("replay", TRACE, "--limit-groups", 2, "--output", tmp_path / "out", *more)
    done = run_python(RUN, *arguments, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "out" / "replay.html").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("replay no.jsonl", "replay.json"),
        ("compare no no", "summary.json"),
        ("compare no no", "report.html"),
        ("certify --model no", "certificate.json"),
    ],
)
def test_a_file_that_is_not_ours_stays(command, name, tmp_path, refused):
    (tmp_path / "kept").write_text("somebody's work")
    for make in ((tmp_path / name).symlink_to, (tmp_path / name).hardlink_to):
        make(tmp_path / "kept")
        said = refused(*command.split(), "--output", tmp_path)
        assert said.endswith(f"--output: {tmp_path / name} is there and not ours: name another place")
        (tmp_path / name).unlink()
    assert (tmp_path / "kept").read_text() == "somebody's work"


def test_names_that_are_no_text_and_terminals_without_letters(tmp_path):
    for name in (b"\xff.jsonl", "\u00d7.jsonl".encode()):
        trace = os.fsdecode(bytes(tmp_path) + b"/" + name)
        Path(trace).write_text(to_line("a", 1, [1], [[5, 6, 5, 6, 5, 6]]))
        arguments, env = ("replay", trace, "--output", tmp_path / "out"), {"PYTHONIOENCODING": "ascii"}
        done = run_python(RUN, *arguments, stdout=subprocess.PIPE, env={**os.environ, **env})
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


def test_too_little_memory_is_one_line(monkeypatch, refused):
    monkeypatch.setattr("rollout_spec.cli.replay.spec_options", Mock(side_effect=MemoryError))
    assert refused("replay", TRACE) == "rollout-spec replay: needs more memory than there is"


def test_a_closed_output_is_no_fault():
    arguments = "replay", str(TRACE), "--limit-groups", "2"
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_certify_says_what_it_needs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run_python(f"import sys; sys.modules['torch'] = None\n{RUN}", "certify", "--model", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("rollout-spec certify: needs torch, which is not installed here")
