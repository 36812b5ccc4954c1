"""No layer imports upward, and a package imports only what MAY_IMPORT, DESIGN.md and its docstring allow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rollout_spec"
# From the bottom up: (what of rollout_spec, what else) a package may import. A file's entry adds to its
# package's.
MAY_IMPORT = {
    "config": ("", ""),
    "metrics": ("", ""),
    "patches": ("", ""),
    "processes": ("", ""),
    "trace": ("config", "numpy"),
    "drafting": ("config metrics", "numpy"),
    "verification": ("", "numpy torch"),
    "vllm": ("config metrics patches drafting verification", "numpy torch vllm"),
    "verl_cpu": ("patches", "ray torch transformers verl zmq"),
    "verl": (
        "config metrics patches trace drafting vllm verl_cpu",
        "hydra omegaconf ray tensordict transfer_queue verl",
    ),
    "vllm/plugin.py": ("", "pydantic"),
    "verl/check_config.py": ("", "transformers"),
    "verl/client.py": ("", "vllm"),
    "verl/recorder.py": ("", "vllm"),
    "verl/server.py": ("", "vllm"),
    "report": ("config metrics trace", "jinja2 matplotlib numpy pyarrow rich tensorboard tokenizers wandb"),
    "measure": (
        "config metrics patches processes trace drafting verification vllm verl report",
        "numpy torch",
    ),
    "measure/diagnosis.py": ("", "hydra omegaconf verl"),
    "measure/certify.py": ("", "vllm"),
    "measure/engine_worker.py": ("", "vllm"),
    "measure/host_device.py": ("", "vllm"),
    "measure/host_device_v2.py": ("", "triton vllm"),
    "measure/host_worker.py": ("", "vllm"),
    "measure/host_worker_v2.py": ("", "triton"),
    "measure/triton_on_cpu.py": ("", "triton"),
    "measure/check_steps.py": ("", "vllm"),
    "measure/vllm_drafters.py": ("", "vllm"),
    "measure/drafters.py": ("", "arctic_inference suffix_gpu"),
    "measure/suffix_gpu.py": ("", "suffix_gpu torch"),
    "demo": ("config processes trace verl report", ""),
    "demo/data.py": ("", "pandas"),
    "demo/model.py": ("", "torch transformers"),
    "cli": ("config trace drafting report measure demo", "rich"),
    "cli/inputs.py": ("", "pandas torch transformers"),
}
FILES = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py"))
PACKAGES = sorted(file.removesuffix("/__init__.py") for file in FILES if file.endswith("/__init__.py"))
Pair = tuple[set[str], set[str]]


def imported(file: str) -> list[str]:
    """The dotted names that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The modules that import each other, directly or by others; `imports` is what each module imports."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        while new := {name for each in found | {module} for name in imports[each]} - found:
            found |= new
        return found

    reach = {module: reached(module) for module in imports}
    groups = [frozenset(other for other in reach[module] if module in reach[other]) for module in imports]
    return [set(group) for group in sorted(set(groups), key=sorted) if group]


def modules_imported() -> dict[str, set[str]]:
    """By file, the files of ours that it imports, anywhere in it."""
    files = {f"rollout_spec/{file}".removesuffix(".py").removesuffix("/__init__"): file for file in FILES}
    by_name = {name.replace("/", "."): file for name, file in files.items()}
    imports = {}
    for file in FILES:
        # A name is of a module, or of something in one.
        found = (by_name.get(name) or by_name.get(name.rpartition(".")[0]) for name in imported(file))
        imports[file] = {each for each in found if each is not None} - {file}
    return imports


def layer_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def outside(file: str) -> Pair:
    """What a file imports beyond its own layer and the standard library, as in MAY_IMPORT."""
    ours, foreign = set(), set()
    for name in imported(file):
        first, *rest = name.split(".")
        if first != "rollout_spec":
            foreign.add(first)
        elif rest and rest[0] in MAY_IMPORT:
            ours.add(rest[0])
    return ours - {layer_of(file)}, foreign - set(sys.stdlib_module_names)


def allowed(*entries: str) -> Pair:
    """What entries of MAY_IMPORT allow together."""
    pairs = [MAY_IMPORT[entry] for entry in entries if entry in MAY_IMPORT]
    ours, foreign = (
        (set(" ".join(names).split()) for names in zip(*pairs, strict=True)) if pairs else ((), ())
    )
    return set(ours), set(foreign)


def allowed_to_package(package: str) -> Pair:
    """What a package and its files may import."""
    return allowed(*(entry for entry in MAY_IMPORT if layer_of(entry) == package))


def named_in(text: str) -> Pair:
    """The names of a list: in backticks those of rollout_spec."""
    return set(re.findall(r"`(\w+)`", text)), set(re.findall(r"\w+", re.sub("`.*?`", "", text)))


def design() -> dict[str, str]:
    """The last column of DESIGN.md's table, by package."""
    rows = re.findall(
        r"^\| `rollout_spec/(\w+)` \|.*\| (.*) \|$", (ROOT.parent / "DESIGN.md").read_text(), re.M
    )
    return dict(rows)


@pytest.mark.parametrize("file", FILES)
def test_every_import_is_allowed(file):
    ours, foreign = outside(file)
    may_ours, may_foreign = allowed(layer_of(file), file)
    assert ours <= may_ours
    assert foreign <= may_foreign


def test_every_allowance_is_used():
    used = defaultdict(lambda: (set(), set()))
    for file in FILES:
        for entry in (layer_of(file), file):
            for names, imports in zip(used[entry], outside(file), strict=True):
                names |= imports
    for entry in MAY_IMPORT:
        ours, foreign = allowed(entry)
        assert ours <= used[entry][0], entry
        assert foreign <= used[entry][1], entry


def test_no_layer_may_import_one_above_it():
    layers = [entry for entry in MAY_IMPORT if "/" not in entry]
    assert set(PACKAGES) <= set(layers)
    for package in PACKAGES:
        assert allowed_to_package(package)[0] <= set(layers[: layers.index(package)]), package


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}
    assert circles(imports) == [{"a", "b", "c"}]
    assert circles({**imports, "c": set()}) == []


def test_no_two_modules_import_each_other():
    """Not inside functions either."""
    assert circles(modules_imported()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_design_and_the_docstring_say_the_same(package):
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    (sentence,) = re.findall(r"May import: ([^.]*)\.", docstring)
    assert named_in(sentence) == allowed_to_package(package)
    assert named_in(design()[package]) == allowed_to_package(package)


def test_nothing_that_is_read_is_executed():
    """What peers and files hold is data: reading a pickle may run whatever its writer has chosen."""
    readers = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert not [file for file in FILES for name in imported(file) if name.split(".")[0] in readers]


def test_only_one_module_imports_the_c_module():
    importers = [file for file in FILES if any("._native" in name for name in imported(file))]
    assert importers == ["drafting/native.py"]


def test_drafting_imports_without_what_other_packages_need():
    modules = [file.removesuffix(".py").replace("/", ".") for file in FILES if file.startswith("drafting/")]
    foreign = set.union(*(allowed_to_package(package)[1] for package in PACKAGES))
    blocked = sorted(foreign - allowed_to_package("drafting")[1])
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked}));"
    code += "".join(f"import rollout_spec.{module};" for module in [*modules, "config", "metrics"])
    subprocess.run([sys.executable, "-c", code], check=True)
