"""Small copies between the host and a device, and what the host does while it waits for one.

A copy back waits for the device; a copy to it does not.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

# It asks before each piece whether there is time.
Work = Callable[[Callable[[], bool]], None]
_work: Work | None = None


def sent(values: npt.NDArray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values on the device; what is there already stays as it is.

    The host's go there from pinned memory: any other copy would wait for all work before it.
    """
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def do_while_waiting(work: Work) -> None:
    """Let the host do this when it next waits for the device; once.

    In a step that draws tokens that is in the race (`coupled`), else where draft tokens are `fetched`, else
    where MRV1's runner waits for the step's tokens.
    """
    global _work
    _work = work


def before_wait() -> None:
    """Do that while the device works. All that the host is about to wait for has been launched."""
    global _work
    work, _work = _work, None
    if work is not None:
        event = torch.cuda.Event()
        event.record()
        work(lambda: not event.query())


def fetched(*tensors: torch.Tensor) -> list[npt.NDArray[np.int32]]:
    """Token ids, flat and on the host; with one wait for all of them."""
    flat = [tensor.view(-1) for tensor in tensors]
    if flat[0].device.type != "cpu":
        together = torch.cat([tensor.to(torch.int32) for tensor in flat])
        before_wait()
        flat = list(together.cpu().split([len(tensor) for tensor in flat]))
    return [tensor.numpy().astype(np.int32, copy=False) for tensor in flat]
