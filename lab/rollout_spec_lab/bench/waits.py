"""Where the host waits for a device."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

SYNCHRONIZES = "called a synchronizing"  # in torch's warning
WAITS = {  # by model runner, as docs/how-it-works/verification.md says of sampled rows
    "MRV1": {"plain": 1, "with drafts": 3},
    "MRV2": {"plain": 0, "with drafts": 0},
}


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _set_sync_debug_mode() -> Callable[[str], None] | None:
    """What makes torch warn of every wait for the device; None where the device has no such thing."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return getattr(getattr(torch, device.type), "set_sync_debug_mode", None) if device else None


@contextlib.contextmanager
def waits() -> Iterator[list[str] | None]:
    """The places where the host waits for the device inside, once for each time; None: they are not seen."""
    set_mode, places = _set_sync_debug_mode(), list[str]()
    if set_mode is None:
        yield None
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            yield places
        finally:
            set_mode("default")
    seen = [one for one in caught if SYNCHRONIZES in str(one.message)]
    places += [f"{Path(one.filename).name}:{one.lineno}" for one in seen]


def sentence(found: Mapping[str, Sequence[str] | None], model_runner: str = "MRV1") -> str:
    """Whether the places where the host waited, by plain and with drafts, are as many as documented."""
    counted = {kind: len(places) for kind, places in found.items() if places is not None}
    if not counted:
        return "Waits in sampling: not counted on this device."
    documented = WAITS[model_runner]
    texts = (f"{kind} {num} (documented: {documented[kind]})" for kind, num in counted.items())
    as_said = all(num == documented[kind] for kind, num in counted.items())
    return f"Waits in sampling are {'' if as_said else 'not '}as documented: {', '.join(texts)}."
