"""A package imports what its docstring says ("May import: ..."), and nothing that stands above it.

In that sentence names in backticks are packages and modules of the same distribution, the others are foreign.
A package without such a sentence goes by its parent's.
"""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"rollout_spec": ROOT, "rollout_spec_lab": ROOT / "lab"}
# By dotted name, `__init__` included as the package's.
MODULES = {
    ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
    for top, folder in DISTRIBUTIONS.items()
    for file in sorted((folder / top).rglob("*.py"))
}
PACKAGES = [module for module, file in MODULES.items() if file.name == "__init__.py"]


@cache
def imported(module):
    names = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def contract(package):
    """The names after "May import:" in a package's docstring, ours with backticks; None: it has none."""
    docstring = ast.get_docstring(ast.parse(MODULES[package].read_text())) or ""
    found = re.search(r"May import: (.*?)\.(?:\s|$)", docstring, re.DOTALL)
    if found is None:
        return None
    names = found[1].replace("\n", " ").split(", ")
    assert all(re.fullmatch(r"`[\w.]+`|\w+", name) for name in names), f"{package}: {names}"
    return frozenset(names)


@cache
def owner(module):
    while module not in PACKAGES or contract(module) is None:
        assert "." in module, f"{module} has no sentence of what it may import"
        module = module.rpartition(".")[0]
    return module


def module_of(name):
    while name not in MODULES and name:
        name = name.rpartition(".")[0]
    return name or None


def outside(module):
    """What a module imports beyond its own package and the standard library: of each the names, as they stand
    in a contract, of which one suffices."""
    top, package = module.partition(".")[0], owner(module)
    found: set[tuple[str, ...]] = set()
    for name in imported(module):
        first, *path = (module_of(name) or name).split(".")
        if first != top:
            found |= {(first,)} - {(each,) for each in sys.stdlib_module_names}
            continue
        target = owner(".".join([first, *path]))
        # What a package holds is its own; the distribution's packages are not its loose modules'.
        is_inside = target == package or (package != top and target.startswith(f"{package}."))
        if path and not is_inside:
            # A package's name covers the packages in it, but not for those: they name each other.
            least = target.count(".") if f"{package}.".startswith(f"{top}.{path[0]}.") else 1
            found.add(tuple(f"`{'.'.join(path[:length])}`" for length in range(least, len(path) + 1)))
    return found


def graph(depth):
    shortened = {module: ".".join(module.split(".")[:depth]) for module in MODULES}
    found: dict[str, set[str]] = {name: set() for name in shortened.values()}
    for module, short in shortened.items():
        targets = filter(None, map(module_of, imported(module)))
        found[short] |= {shortened[target] for target in targets} - {short, *DISTRIBUTIONS}
    return found


def test_every_import_is_in_the_contract():
    for module in MODULES:
        allowed = contract(owner(module)) or set()
        assert [each for each in outside(module) if not allowed & set(each)] == [], module


@pytest.mark.parametrize("depth", [2, 3, 99], ids=["packages", "packages in them", "modules"])
def test_nothing_imports_in_circles(depth):
    """Imports inside functions count too: they defer what an import costs, and are no way out of a circle."""
    TopologicalSorter(graph(depth)).prepare()  # raises CycleError


def test_no_package_looks_for_its_own_modules():
    """What it found would import it, in a circle that no import statement shows."""
    for module, file in MODULES.items():
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert "__path__" not in names, module


def test_the_product_knows_nothing_of_the_laboratory():
    files = [*(ROOT / "rollout_spec").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    assert [file for file in files if "rollout_spec_lab" in file.read_text()] == []


def test_nothing_that_is_read_is_executed_and_one_module_imports_the_c_module():
    """What peers and files hold is data: reading a pickle may run whatever its writer has chosen."""
    readers = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert not [m for m in MODULES for name in imported(m) if name.split(".")[0] in readers]
    importers = [m for m in MODULES if any("_native" in name.split(".") for name in imported(m))]
    assert importers == ["rollout_spec.drafting.native"]
