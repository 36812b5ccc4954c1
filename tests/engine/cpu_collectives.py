"""What experts on data-parallel ranks need of vLLM 0.24's CPU engine: two collectives."""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def all_gatherv(self, input_, dim=0, sizes=None):
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
