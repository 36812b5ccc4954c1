"""No layer imports upward, and only the named modules import vLLM, verl or torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rollout_spec"
# What each layer may import of the others; every one may import the modules beside the packages.
LAYERS = {
    "": (),
    "drafting": (),
    "verification": (),
    "vllm": ("drafting", "verification"),
    "verl_cpu": (),
    "verl": ("drafting", "vllm", "verl_cpu"),
    "report": (),
    "measure": ("drafting", "verification", "vllm", "report"),
    "demo": ("report", "verl_cpu"),
    "cli": ("drafting", "verification", "vllm", "verl", "verl_cpu", "report", "measure", "demo"),
}
# Where each foreign package may be imported: packages, and modules that stand alone in theirs.
FOREIGN = {
    "torch": (
        "verification",
        "vllm",
        "verl",
        "verl_cpu",
        "measure",
        "demo",
        "cli/certify.py",
        "cli/doctor.py",
        "cli/inputs.py",
    ),
    "vllm": (
        "vllm",
        "verl/server.py",
        "verl_cpu",
        "measure/certify.py",
        "measure/engine_worker.py",
        "measure/vllm_drafters.py",
        "cli/doctor.py",
    ),
    "verl": ("verl", "verl_cpu", "vllm/ascend.py", "cli/doctor.py"),
    "ray": ("verl", "verl_cpu"),
    "hydra": ("verl", "cli/doctor.py"),
}
FILES = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py"))


def imported(name: str) -> list[str]:
    """The dotted names that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer_of(path: str) -> str:
    first = path.split("/")[0]
    return first if first in LAYERS else ""


@pytest.mark.parametrize("name", FILES)
def test_no_layer_imports_upward(name):
    own = layer_of(name)
    for imports in imported(name):
        package, *rest = imports.split(".")
        if package == "rollout_spec" and rest:
            other = layer_of(rest[0])
            assert other in ("", own, *LAYERS[own]), f"{name} imports {imports}"


@pytest.mark.parametrize("name", FILES)
def test_foreign_packages_stay_at_their_places(name):
    for imports in imported(name):
        places = FOREIGN.get(imports.split(".")[0])
        assert places is None or name.split("/")[0] in places or name in places, f"{name} imports {imports}"


def test_drafting_needs_neither_torch_nor_vllm_nor_verl():
    modules = [file.removesuffix(".py").replace("/", ".") for file in FILES if file.startswith("drafting/")]
    blocked = ("torch", "vllm", "verl", "ray", "hydra", "transformers")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked}));"
    code += "".join(f"import rollout_spec.{module};" for module in [*modules, "config", "metrics"])
    subprocess.run([sys.executable, "-c", code], check=True)
