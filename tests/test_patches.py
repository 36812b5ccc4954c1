"""The patch register: guards, idempotence, and what a failed guard leaves behind."""

import ast
import importlib
import re
import sys
import threading
import types
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollout_spec
from rollout_spec import patches


def _original(a, b=1):
    return a + b


def product(a, b=1):
    return a * b


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(patches, "_applied", {})
    owner = types.ModuleType("owner")
    owner.f = _original
    return owner


PATCH = patches.Patch(name="double", reason="f adds", upstream="owner/f.py", until="owner 2")


def test_patches_replace_once_and_stack_on_one_function(module):
    for replacement in (product, lambda a, b=1: 0):
        assert patches.replace_function(module, "f", replacement, patch=PATCH) is _original
        assert module.f(3, 4) == 12
    assert patches.applied() == [PATCH]
    second, inner = patches.Patch(name="negate", reason="r", upstream="u", until="v"), module.f
    patches.replace_function(module, "f", lambda a, b=1: -inner(a, b), patch=second)
    assert patches.applied() == [PATCH, second]
    assert patches.replace_function(module, "f", lambda a, b=1: 0, patch=PATCH) is _original
    assert module.f(3, 4) == -12, "the first is in force below the second"


def test_changed_upstream_raises_and_changes_nothing(module):
    message = r"'double'.*owner\.g does not exist.*f adds.*owner/f.py.*owner 2"
    with pytest.raises(patches.PatchError, match=message):
        patches.replace_function(module, "g", product, patch=PATCH)
    assert not hasattr(module, "g")
    assert patches.applied() == []


def test_what_wraps_a_function_says_what_it_counts_on(module):
    for wrong in (lambda f, b: 0, lambda f, a, b, c: 0, lambda f, a: 0, lambda f, b, *args: 0):
        with pytest.raises(patches.PatchError, match=r"owner\.f takes a, b"):
            patches.wrap(module, "f", PATCH)(wrong)
        assert module.f is _original
    for _ in range(2):  # once
        patches.wrap(module, "f", PATCH)(lambda f, a, *others: 10 * f(a, *others))
        assert module.f(3, 4) == 10 * _original(3, 4)
    with pytest.raises(patches.PatchError, match=r"owner\.g takes nothing: it is gone"):
        patches.wrap(module, "g", PATCH)(lambda f: 0)


def test_a_body_that_was_not_read_is_named(module, monkeypatch):
    said = []
    monkeypatch.setattr(patches.logger, "warning", lambda line, *args: said.append(line % args))
    monkeypatch.setattr(module, "g", lambda a: a, raising=False)
    patches.wrap(module, "f", PATCH, "0" * 8, patches.body_digest(_original))(lambda f, a, b: 0)
    assert said == []
    patches.wrap(module, "g", PATCH, "0" * 8)(lambda g, a: 0)
    assert len(said) == 1 and "owner.g is not as it was when patch 'double' was" in said[0]


class Base:
    def f(self, a, b=1):
        return [a, b]

    def g(self):
        return "g"


class Doubling(Base):
    def f(self, a, *others):
        return 2 * super().f(a, *others)


def test_a_class_stands_before_an_objects_own(module):
    class Platforms(Base):
        def f(self, a, b=1):
            return [*super().f(a, b), "platform"]

    made = Platforms()
    for _ in range(2):  # once
        patches.put_before(Doubling, made, PATCH)
    assert made.f(3) == [3, 1, "platform"] * 2
    assert made.g() == "g" and isinstance(made, Platforms)
    assert Platforms().f(3) == [3, 1, "platform"], "no other object is changed"
    assert patches.applied() == [PATCH]


def _methods(node):
    """Names of the functions in a class, also of those that only some versions get."""
    parts = [node, *(each for each in node.body if isinstance(each, ast.If))]
    found = [each.name for part in parts for each in (*part.body, *getattr(part, "orelse", ()))
             if isinstance(each, ast.FunctionDef)]  # fmt: skip
    return [name for name in found if name != "__init__"]


def test_a_line_above_each_class_says_before_which_methods_it_stands():
    """And in which order: later ones are put before earlier ones."""
    lines = re.compile(r"^# Before (\w+)(?:, (\d))?(?:: ((?:[\w, ]+\n(?:# )?)+)|\n)class (\w+)", re.MULTILINE)
    num_put = 0
    for file in sorted((Path(rollout_spec.__file__).parent / "vllm").rglob("*.py")):
        tree = ast.parse(file.read_text())
        said = {name: (base, int(number or 1)) for base, number, _, name in lines.findall(file.read_text())}
        methods = {name: re.findall(r"\w+", named) for _, _, named, name in lines.findall(file.read_text())}
        classes = {node.name: _methods(node) for node in tree.body if isinstance(node, ast.ClassDef)}
        assert {name: classes[name] for name in methods} == methods
        orders = defaultdict[str, list[int]](list)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            if getattr(call.func, "id", "") == "put_before":
                num_put += 1
                names = {each.id for each in ast.walk(call.args[0]) if isinstance(each, ast.Name)}
                for base, number in {said[name] for name in names & classes.keys()}:
                    orders[base].append(number)
        assert all(numbers == sorted(numbers) for numbers in orders.values()), (file, orders)
    assert num_put > 15


def test_a_class_that_no_longer_fits_stands_before_nothing(module):
    def kind(name, *bases, **methods):
        return type(name, bases or (Base,), methods)

    renamed = kind("Renamed", f=lambda self, b, a=1: [b, a])
    more = kind("More", f=lambda self, a, b=1, *, c=2: [a, b, c])
    gone = kind("Gone", h=lambda self: None)
    fewer = kind("Fewer", f=lambda self, a: None)
    keyword = kind("Keyword", f=lambda self, *args, b, c=0: None)
    below = kind("Below", Doubling, gone)  # the methods of the classes below it are looked at too
    for ours, base in ((Doubling, renamed), (gone, Base), (fewer, Base), (keyword, Base), (below, Base)):
        with pytest.raises(patches.PatchError, match=r"(Renamed\.f takes self, b, a)|(Base\.[fh] takes)"):
            patches.put_before(ours, made := base(), PATCH)
        assert type(base()) is base and type(made) is base
    patches.put_before(Doubling, made := more(), PATCH)
    assert made.f(3) == [3, 1, 2] * 2
    assert patches.applied() == [PATCH]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(text)`: the module `waited`, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "waited.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("waited", None)


def add_one(module):
    module.VALUE += 1


def test_patches_wait_for_the_import_and_keep_their_order(write):
    write("VALUE = 1")
    patches.when_imported("waited", add_one)
    patches.when_imported("waited", lambda module: setattr(module, "VALUE", 10 * module.VALUE))
    module = importlib.import_module("waited")
    assert module.VALUE == 20
    patches.when_imported("waited", add_one)
    assert module.VALUE == 21, "it is imported already"


def test_a_question_whether_a_module_exists_and_an_import_that_fails_lose_no_patch(write):
    patches.when_imported("waited", add_one)
    assert importlib.util.find_spec("waited") is None
    write("raise ImportError('not yet')")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("waited")
    write("VALUE = 100")
    assert importlib.import_module("waited").VALUE == 101


def test_a_patch_that_is_declared_during_an_import_waits_for_its_end(write):
    write("import threading, rollout_spec\nrollout_spec.begun.set()\n"
          "assert rollout_spec.go.wait(60)\nVALUE = 1")  # fmt: skip
    rollout_spec.begun, rollout_spec.go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        imported = threads.submit(importlib.import_module, "waited")
        assert rollout_spec.begun.wait(60)
        declared = threads.submit(patches.when_imported, "waited", add_one)
        rollout_spec.go.set()
        declared.result()
        assert imported.result().VALUE == 2
