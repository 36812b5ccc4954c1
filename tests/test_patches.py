"""The patch register: guards, idempotence, and what a failed guard leaves behind."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

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


def test_when_imported_waits_for_the_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    seen = []
    patches.when_imported("late_module", lambda module: seen.append(module.VALUE))
    assert seen == []
    importlib.import_module("late_module")
    assert seen == [1]
    patches.when_imported("late_module", lambda module: seen.append(module.VALUE + 1))
    assert seen == [1, 2]


def test_several_hooks_may_wait_for_one_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "twice_module.py").write_text("")
    seen = []
    patches.when_imported("twice_module", lambda module: seen.append("first"))
    patches.when_imported("twice_module", lambda module: seen.append("second"))
    importlib.import_module("twice_module")
    assert sorted(seen) == ["first", "second"]


def test_an_error_in_a_hook_fails_the_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("")

    def fail(module):
        raise patches.PatchError("no longer fits")

    patches.when_imported("broken_module", fail)
    with pytest.raises(patches.PatchError, match="no longer fits"):
        importlib.import_module("broken_module")
