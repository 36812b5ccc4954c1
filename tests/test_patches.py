"""The patch register: guards, idempotence, and what a failed guard leaves behind."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

import rollout_spec
from rollout_spec import patches


def _original(a, b=1):
    return a + b


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(patches, "_applied", {})
    owner = types.ModuleType("owner")
    owner.f = _original
    return owner


PATCH = patches.Patch(name="double", reason="f adds", upstream="owner/f.py", until="owner 2")


def test_replace_function_replaces_and_records(module):
    before = patches.replace_function(
        module, "f", lambda a, b=1: a * b, patch=PATCH, expected_signature=str(inspect.signature(_original))
    )
    assert before is _original
    assert module.f(3, 4) == 12
    assert patches.applied() == [PATCH]


def test_second_call_returns_the_first_original_and_keeps_the_replacement(module):
    patches.replace_function(module, "f", lambda a, b=1: a * b, patch=PATCH)
    again = patches.replace_function(module, "f", lambda a, b=1: 0, patch=PATCH, expected_signature="(other)")
    assert again is _original
    assert module.f(3, 4) == 12
    assert len(patches.applied()) == 1


@pytest.mark.parametrize(
    "guard",
    [{"expected_signature": "(a)"}, {"expected_signature": ("(a)", "(a, b)")}],
)
def test_changed_upstream_raises_and_changes_nothing(module, guard):
    with pytest.raises(patches.PatchError, match=r"'double'.*owner.f.*f adds.*owner/f.py.*owner 2"):
        patches.replace_function(module, "f", lambda a, b=1: a * b, patch=PATCH, **guard)
    assert module.f is _original
    assert patches.applied() == []


def test_missing_function_raises(module):
    with pytest.raises(patches.PatchError, match=r"owner\.g does not exist"):
        patches.replace_function(module, "g", _original, patch=PATCH)


def test_any_of_several_signatures_is_accepted(module):
    accepted = ("(a)", "(a, b=1)")
    patches.replace_function(module, "f", lambda a, b=1: a * b, patch=PATCH, expected_signature=accepted)
    assert module.f(3, 4) == 12


def test_two_patches_stack_on_one_function(module):
    patches.replace_function(module, "f", lambda a, b=1: a * b, patch=PATCH)
    second = patches.Patch(name="negate", reason="r", upstream="u", until="v")
    inner = module.f
    patches.replace_function(module, "f", lambda a, b=1: -inner(a, b), patch=second)
    assert module.f(3, 4) == -12
    assert [p.name for p in patches.applied()] == ["double", "negate"]
    assert patches.replace_function(module, "f", lambda a, b=1: 0, patch=PATCH) is _original
    assert module.f(3, 4) == -12, "the first is in force below the second"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(name, text)`: a module that can be imported, and what has been applied to it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patches, "_waiting", {})
    names = []

    def write(name, text):
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in names:
        sys.modules.pop(name, None)


def add_one(module):
    module.VALUE += 1


def test_when_imported_waits_for_the_import(write):
    write("waited", "VALUE = 1")
    patches.when_imported("waited", add_one)
    module = importlib.import_module("waited")
    assert module.VALUE == 2
    patches.when_imported("waited", add_one)
    assert module.VALUE == 3, "it is imported already"


def test_a_question_whether_a_module_exists_loses_no_patch(write):
    patches.when_imported("waited", add_one)
    assert importlib.util.find_spec("waited") is None
    write("waited", "VALUE = 1")
    assert type(importlib.util.find_spec("waited").loader) is importlib.machinery.SourceFileLoader
    assert importlib.import_module("waited").VALUE == 2


def test_an_import_that_failed_is_patched_when_it_is_tried_again(write):
    write("waited", "raise ImportError('not yet')")
    patches.when_imported("waited", add_one)
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("waited")
    write("waited", "VALUE = 100")
    assert importlib.import_module("waited").VALUE == 101


def test_an_error_in_a_patch_fails_the_import_and_the_next_one_tries_again(write):
    write("waited", "VALUE = 1")
    errors = [patches.PatchError("no longer fits")]

    def fail_once(module):
        if errors:
            raise errors.pop()
        add_one(module)

    patches.when_imported("waited", fail_once)
    with pytest.raises(patches.PatchError, match="no longer fits"):
        importlib.import_module("waited")
    assert "waited" not in sys.modules
    assert importlib.import_module("waited").VALUE == 2


def test_patches_of_one_module_are_applied_in_their_order(write):
    write("waited", "VALUE = 1")
    patches.when_imported("waited", add_one)
    patches.when_imported("waited", lambda module: setattr(module, "VALUE", 10 * module.VALUE))
    module = importlib.import_module("waited")
    assert module.VALUE == 20
    assert importlib.reload(module).VALUE == 20


def test_imports_inside_imports_and_inside_patches(write):
    write("outer", "import inner\nVALUE = inner.VALUE")
    write("inner", "VALUE = 1")
    write("later", "VALUE = 5")

    def add_later(module):
        module.VALUE += importlib.import_module("later").VALUE

    for name, apply in (("outer", add_later), ("inner", add_one), ("later", add_one)):
        patches.when_imported(name, apply)
    assert importlib.import_module("outer").VALUE == 2 + 6


def test_no_thread_sees_a_module_without_its_patch(write):
    write("waited", "import time\ntime.sleep(0.05)\nVALUE = 1")
    patches.when_imported("waited", add_one)
    with ThreadPoolExecutor(8) as threads:
        modules = list(threads.map(importlib.import_module, ["waited"] * 8))
    assert {module.VALUE for module in modules} == {2}


def test_a_patch_that_is_declared_during_an_import_waits_for_its_end(write):
    write("waited", "import threading, rollout_spec\nrollout_spec.begun.set()\n"
          "assert rollout_spec.go.wait(60)\nVALUE = 1")  # fmt: skip
    rollout_spec.begun, rollout_spec.go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        imported = threads.submit(importlib.import_module, "waited")
        assert rollout_spec.begun.wait(60)
        declared = threads.submit(patches.when_imported, "waited", add_one)
        rollout_spec.go.set()
        declared.result()
        assert imported.result().VALUE == 2
