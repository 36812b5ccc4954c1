"""The register of changes made to other packages: each one named, reasoned and guarded."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import wrapt

_MARK = "__rollout_spec_patch__"
logger = logging.getLogger("vllm.rollout_spec.patches")  # vLLM shows what is below its own name


class PatchError(RuntimeError):
    """The code that a patch replaces is gone, or is no longer what the patch was written for."""


@dataclasses.dataclass(frozen=True)
class Patch:
    name: str
    reason: str  # symptom and cause
    upstream: str  # package and file
    until: str  # when it can go


_applied: dict[str, Patch] = {}


def applied() -> list[Patch]:
    """The patches in force in this process, in the order in which they were applied."""
    return list(_applied.values())


def record(patch: Patch) -> None:
    """Register a change that no function below makes: an import hook, an environment variable."""
    _applied[patch.name] = patch


def replace_function(owner: Any, name: str, replacement: Callable, *, patch: Patch) -> Callable:
    """Replace `owner.name` (a module's function or a class's method), unless a patch of this name did so;
    returns the original function. Raises PatchError: there is no such attribute."""
    try:
        current = getattr(owner, name)
    except AttributeError:
        raise misfit(patch, f"{getattr(owner, '__name__', owner)}.{name} does not exist") from None
    mark = getattr(current, _MARK, None)
    while mark is not None:  # another patch may have replaced what this one had replaced
        if mark[0] == patch.name:
            return mark[1]
        mark = getattr(mark[1], _MARK, None)
    setattr(replacement, _MARK, (patch.name, current))
    setattr(owner, name, replacement)
    record(patch)
    return current


@contextlib.contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In here `owner.name` is this value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def wrap(owner: Any, name: str, patch: Patch, *bodies: str) -> Callable[[Callable], Callable]:
    """Decorates what `owner.name` is to do: it gets the original function, then the arguments of the call.

    Its parameters after the first say what the patch counts on: the original's begin with these, and there
    are no others unless it has *args or **kwargs. Where the patch counts on the function's body too, `bodies`
    are the `body_digest` of each that was read, of the vLLM that a comment names. One line in the log names
    any other.

    Raises PatchError: there is no such function, or it takes others. Nothing is replaced then.
    """

    def replace(replacement: Callable) -> Callable:
        _guard_call(patch, owner, name, list(inspect.signature(replacement).parameters.values())[1:])
        original = getattr(owner, name)
        if bodies and body_digest(original) not in bodies:
            logger.warning(
                "rollout_spec: %s.%s is not as it was when patch %r was written beside it; "
                "`rollout-spec certify` shows whether the two still fit", owner.__name__, name, patch.name,
            )  # fmt: skip

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        replace_function(owner, name, call, patch=patch)
        return replacement

    return replace


def body_digest(function: Any) -> str:
    """Eight hexadecimal digits of what a function does, and says of it."""
    source = inspect.getsource(inspect.unwrap(function))
    return hashlib.sha256("".join(source.split()).encode()).hexdigest()[:8]


def put_before(ours: type, instance: Any, patch: Patch, **added: Any) -> None:
    """Let a class of ours stand before an object's own class: its methods override and call `super()`.

    A line above the class says before which class, with which methods, and, where several stand there, as
    which: the one put last runs first. What a platform has made of its class stays below. Idempotent.

    added: attributes that our methods need of the object, which the class declares.

    Raises PatchError: see `guard_class`; the object stays as it was.
    """
    if not isinstance(instance, ours):
        instance.__class__ = _standing_before(ours, type(instance), patch)  # type: ignore[arg-type]
    for name, value in added.items():
        setattr(instance, name, value)
    record(patch)


@functools.cache
def _standing_before(ours: type, base: type, patch: Patch) -> type:
    guard_class(patch, ours, base)
    return type(f"{ours.__name__}{base.__name__}", (ours, base), {"__module__": base.__module__})


def guard_class(patch: Patch, ours: type, base: type) -> None:
    """Raise a PatchError unless each method of `ours`, and of the classes of ours below it, overrides one of
    `base` that can be called so. What it is called with says what the patch counts on, as in `wrap`."""
    for each in ours.__mro__:
        if issubclass(base, each):  # upstream's
            continue
        for name, method in vars(each).items():
            if inspect.isfunction(method) and name != "__init__":
                _guard_call(patch, base, name, list(inspect.signature(method).parameters.values()))


def _guard_call(patch: Patch, owner: Any, name: str, parameters: list[inspect.Parameter]) -> None:
    """Check that a function can be called as one with these parameters is: the first of its own have the same
    names in the same order. It has those that are keywords only, and no others unless *args or **kwargs stand
    for them."""
    ordered = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    guard_parameters(patch, owner, name, ordered)
    found = inspect.signature(getattr(owner, name)).parameters
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not found.keys() >= set(named) or len(parameters) == len(named) < len(found):
        raise misfit(patch, f"{owner.__name__}.{name} takes {', '.join(found)}")


def guard_all(patch: Patch, functions: Iterable[tuple[Any, ...]]) -> None:
    """`guard_parameters` of each function: its owner, its name, and its parameters in each version."""
    for owner, name, *accepted in functions:
        guard_parameters(patch, owner, name, *accepted)


def guard_parameters(patch: Patch, owner: Any, name: str, *accepted: tuple[str, ...]) -> None:
    """Raise a PatchError unless there is such a function, and its parameters begin with one of `accepted`,
    those of each version that the patch was written for; further ones may follow."""
    function = getattr(owner, name, None)
    found = tuple(inspect.signature(function).parameters) if function is not None else ()
    if function is None or not any(found[: len(expected)] == expected for expected in accepted):
        raise misfit(patch, f"{owner.__name__}.{name} takes {', '.join(found) or 'nothing: it is gone'}")


def misfit(patch: Patch, detail: str) -> PatchError:
    """The error of a patch that does not fit: `detail` is what was found instead."""
    return PatchError(
        f"patch {patch.name!r} does not fit the installed packages: {detail}. "
        f"It works around: {patch.reason} ({patch.upstream}; needed until {patch.until})."
    )


def when_imported(module: str, apply: Callable[[Any], None]) -> None:
    """Call `apply(module)` once the module has been loaded, and at once if it is loaded already.

    For patches of modules whose import here would be circular, or cost seconds. An error in `apply` fails
    the import.
    """
    if module in sys.modules:
        importlib.import_module(module)  # waits for a thread that is importing it
    wrapt.register_post_import_hook(apply, module)
