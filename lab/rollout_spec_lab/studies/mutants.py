"""Break the code in many small ways, and see which changes the fast tests do not notice: `make mutants`.

    python -m rollout_spec_lab.studies.mutants [FILE ...] [--jobs 2]

mutmut changes the Python, and runs the tests that python_mutants.json names for each file, none of which
starts an engine. It knows no C: native_mutants.json lists the changes of the C core, each of them built in a
copy. What lives is written to build/mutants; lab/record/mutants.md says why.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "mutants"
COPIED = (
    "configs", "docs", "lab", "native", "recipes", "rollout_spec", "tests", "pyproject.toml", "setup.py",
    "README.md",
)  # fmt: skip
KILLED = {1, 3, 24, 36, 152, 255, -24}  # a test failed, or the mutant hangs
LEAST_SHARE = 0.9  # where an error is silent
HYPOTHESIS = ("--hypothesis-seed=0", "--hypothesis-profile=mutants")


class Target(NamedTuple):
    files: list[str]
    tests: list[str]
    chosen: str = ""  # pytest's -k; by default all
    is_silent: bool = False  # nobody would see a wrong token or a wrong name


TARGETS = [Target(**each) for each in json.loads(Path(__file__).with_name("python_mutants.json").read_text())]
FILES = [file for target in TARGETS for file in target.files]


def core_mutants() -> list[tuple[str, str, str]]:
    """File, old and new of native_mutants.json; SystemExit if what one replaces is not once in its file."""
    listed = json.loads(Path(__file__).with_name("native_mutants.json").read_text())
    found = [(file, old, new) for file, pairs in listed.items() for old, new in pairs]
    stale = [(file, old) for file, old, _ in found if (ROOT / "native" / file).read_text().count(old) != 1]
    if stale:
        lines = "".join(f"\n  native/{file}: {old!r}" for file, old in stale)
        raise SystemExit(f"native_mutants.json: not once in its file:{lines}")
    return found


CORE_TESTS = [f"tests/test_{name}.py" for name in ("index", "index_oracle", "groups", "groups_machine")]
MOST_SECONDS = 300  # in which they are done many times over


class Result(NamedTuple):
    num: int
    survivors: list[str]  # their diffs

    @property
    def share(self) -> float:
        """Of the mutants, those that die."""
        return 1.0 - len(self.survivors) / max(1, self.num)


def copy_tree(folder: Path) -> None:
    """What the tests need, with the native module as it is built here."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "configs", folder / "rollout_spec_configs")
    patches, guarded = folder / "rollout_spec/patches.py", 'name != "__init__"'
    before, after = patches.read_text().split(guarded)  # a ValueError, unless it is there once
    # mutmut's copies of a method override nothing.
    patches.write_text(f'{before}{guarded} and "mutmut" not in name{after}')


def mutate_python(files: list[str], target: Target, jobs: int) -> dict[str, Result]:
    """What became of each file's mutants."""
    folder = BUILD / "_".join(Path(file).stem for file in files)
    copy_tree(folder)
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", *HYPOTHESIS]
    settings = {
        "source_paths": ["rollout_spec"],
        "only_mutate": files,
        "also_copy": [name for name in COPIED if name != "rollout_spec"] + ["rollout_spec_configs"],
        "pytest_add_cli_args": options + ["-k", target.chosen] * bool(target.chosen),
        "pytest_add_cli_args_test_selection": target.tests,
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    with (folder / "pyproject.toml").open("a") as file:
        file.write("\n".join(["\n[tool.mutmut]", *lines, ""]))
    run_mutmut(folder, "run", "--max-children", str(jobs), shown=True)
    results = {}
    for path in files:
        codes = json.loads((folder / "mutants" / f"{path}.meta").read_text())["exit_code_by_key"]
        alive = [name for name in sorted(codes) if codes[name] not in KILLED]
        diffs = [f"# {codes[name]}: {run_mutmut(folder, 'show', name)}" for name in alive]
        results[path] = Result(len(codes), diffs)
    return results


def run_mutmut(folder: Path, *command: str, shown: bool = False) -> str:
    """What mutmut prints; its progress goes to stderr where it is `shown`."""
    # This environment's packages come before mutmut's; the package itself comes from the copy.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    threads = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, "PYTHONPATH": f"{site}:{folder}/lab", **threads}
    mutmut = [str(Path(sys.prefix) / "mutants" / "bin" / "python"), "-m", "mutmut", *command]
    to = sys.stderr if shown else subprocess.PIPE
    done = subprocess.run(mutmut, cwd=folder, env=environment, stdout=to, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"mutmut {' '.join(command)} in {folder} fails\n{(done.stdout or '')[-3000:]}")
    return done.stdout or ""


def mutate_core() -> Result:
    folder, mutants, living = BUILD / "core", core_mutants(), []
    copy_tree(folder)
    for name, old, new in mutants:
        file = folder / "native" / name
        text = file.read_text()
        file.write_text(text.replace(old, new))
        if core_lives(folder):
            living.append(f"native/{name}\n-{old}\n+{new}\n")
        file.write_text(text)
    return Result(len(mutants), living)


def core_lives(folder: Path) -> bool:
    """Whether the C tests and those beside the oracle pass."""
    make = ["timeout", str(MOST_SECONDS), "make", "-C", "native", "test", f"BUILD={folder}/c"]
    if subprocess.run(make, cwd=folder, capture_output=True).returncode:  # or it hangs
        return False
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--rootdir", ".", *HYPOTHESIS]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder}/lab"}
    pytest = ["timeout", str(MOST_SECONDS), sys.executable, "-m", "pytest", *options, *CORE_TESTS]
    return not subprocess.run(pytest, cwd=folder, env=environment, capture_output=True).returncode


def results_of(wanted: list[str], jobs: int) -> Iterator[tuple[str, bool, Result]]:
    """Each file and the native core: its name, whether it is silent, and its result."""
    for target in TARGETS:
        if files := [file for file in target.files if file in wanted]:
            for file, result in mutate_python(files, target, jobs).items():
                yield file, target.is_silent, result
    if "native" in wanted:
        yield "native", False, mutate_core()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of those that are mutated, or native; by default all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants of Python at a time")
    arguments = parser.parse_args()
    wanted = arguments.files or [*FILES, "native"]
    if unknown := [file for file in wanted if file not in (*FILES, "native")]:
        parser.error(f"{unknown[0]}: must be native or one of {', '.join(FILES)}")
    too_few = []
    print("| file | mutants | survived | killed |\n|---|---|---|---|")
    for file, is_silent, result in results_of(wanted, arguments.jobs):
        print(f"| {file} | {result.num} | {len(result.survivors)} | {result.share:.0%} |", flush=True)
        (BUILD / f"{file.replace('/', '_')}.txt").write_text("\n".join(result.survivors))
        if is_silent and result.share < LEAST_SHARE:
            too_few.append(file)
    if too_few:
        raise SystemExit(f"less than {LEAST_SHARE:.0%} die: {', '.join(too_few)}")


if __name__ == "__main__":
    main()
