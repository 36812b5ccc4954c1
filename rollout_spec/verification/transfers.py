"""Small copies between the host and a device, and what the host does while it waits for one.

A copy back waits for the device; a copy to it does not.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values on the device; what is there already stays as it is.

    The host's go there from pinned memory: any other copy would wait for all work before it.
    """
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def just_wait() -> None:
    """A `before_wait` where the host has nothing to do."""


def to_host(
    *tensors: torch.Tensor, before_wait: Callable[[], None] = just_wait
) -> list[npt.NDArray[np.int32]]:
    """Token ids, flat and on the host; with one wait for all of them."""
    flat = [tensor.view(-1) for tensor in tensors]
    if flat[0].device.type != "cpu":
        together = torch.cat([tensor.to(torch.int32) for tensor in flat])
        before_wait()
        flat = list(together.cpu().split([len(tensor) for tensor in flat]))
    return [tensor.numpy().astype(np.int32, copy=False) for tensor in flat]
