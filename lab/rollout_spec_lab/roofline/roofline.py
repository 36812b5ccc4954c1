"""Step times predicted from a model's config.json and a device's datasheet.

A step reads the weights and the KV cache, computes on its tokens, talks to its peers and launches kernels: a
roofline (Williams et al. 2009) for each kind of layer, and a floor. A mixture of experts reads the experts
that its tokens touch, if routed uniformly; expert-parallel devices wait for the one that has most of them.
Attention reads the KV cache once a step, however many tokens are verified: its FLOPs stay below the ridge up
to K = 16. A recurrent layer reads a state of each row and writes one of each token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist

from rollout_spec.predict.step_times import Times
from rollout_spec.recurrent import MAX_RECURRENT_TOKENS
from rollout_spec_lab.roofline.model import Model, RooflineError

BLEND = 1.6
"""A product takes the norm with this exponent of its memory time and its compute time: 1 would be their sum,
infinity the longer one. Rounding tokens up to tiles of 64, 128 or 256 fits no device better."""
# Times that a sampler reads or writes the float32 logits: conversion, temperature, and a race in two passes.
LOGIT_PASSES = 6
_LOGIT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Device:
    """What a datasheet says of one device.

    Links: bytes per second in one direction, and what a collective takes however short its message.
    """

    flops_per_s: float  # dense, bfloat16
    bytes_per_s: float
    memory_bytes: float
    memory_efficiency: float  # the share of the bandwidth that an engine gets
    compute_efficiency: float  # and that of the FLOP/s
    launch_s: float  # of each layer and step, that reading and computing do not hide
    link_bytes_per_s: float
    link_s: float
    network_bytes_per_s: float
    network_s: float
    node_size: int = 8


# The fields in their order. lab/record/roofline.md has the datasheets, and the step times that the two
# efficiencies and launch_s are fitted to.
DEVICES: Mapping[str, Device] = {
    "h100": Device(989.4e12, 3.35e12, 80e9, 0.9, 0.72, 52e-6, 450e9, 10e-6, 50e9, 20e-6),
    "h200": Device(989.4e12, 4.8e12, 141e9, 0.9, 0.72, 52e-6, 450e9, 10e-6, 50e9, 20e-6),
    "a100": Device(312e12, 2.039e12, 80e9, 0.95, 0.84, 99e-6, 300e9, 10e-6, 25e9, 20e-6),
    "910b": Device(376e12, 1.6e12, 64e9, 0.9, 0.72, 380e-6, 196e9, 15e-6, 25e9, 30e-6),
}


# By whether a step has drafts, seconds that it and each of its rows wait for the host because of a drafter.
Host = Mapping[bool, tuple[float, float]]
# By vLLM's model runner: lines through what `bench host` measured at 1 to 256 rows, vLLM's part and the
# drafter's (lab/record/host.md). MRV2 schedules steps without drafts ahead; MRV1 with a drafter none.
HOSTS: Mapping[str, Host] = {
    "mrv1": {False: (0.7e-3, 13e-6), True: (1.2e-3, 21e-6)},
    "mrv2": {False: (0.0, 0.0), True: (1.2e-3, 26e-6)},
}


@dataclasses.dataclass(frozen=True)
class Roofline(Times):
    """Seconds of a step of one data-parallel rank. RooflineError: the model has no such layout or room."""

    model: Model
    device: Device
    tensor_parallel: int = 1  # devices of a rank
    data_parallel: int = 1  # ranks that step together and spread the experts over all their devices
    expert_parallel: bool = False  # a device has whole experts, no slices; always with several ranks
    memory_share: float = 0.9
    host: Host | None = None  # what steps wait for; None: they are scheduled ahead, as without a drafter
    stretch: float = 1.0  # a recorded step stands for so many, with a context as many times as long

    def __post_init__(self) -> None:
        model, tp, dp = self.model, self.tensor_parallel, self.data_parallel
        if model.num_heads % tp or max(model.num_kv_heads, tp) % min(model.num_kv_heads, tp):
            heads = f"{model.num_heads} heads and {model.num_kv_heads} KV heads"
            raise RooflineError(f"--tp {tp}: does not divide the model's {heads}")
        if dp > 1 and not model.num_experts:
            raise RooflineError(f"--dp {dp}: a dense model's ranks do not wait for others: use --replicas")
        if self.expert_parallel and not model.num_experts:
            raise RooflineError("--expert-parallel: a dense model has no experts")
        if self.kv_tokens * self.stretch < 1:
            raise RooflineError(
                f"--tp {tp} --dp {dp}: {self._weight_bytes / 1e9:.0f} GB of weights a device "
                f"do not fit into {self.memory_share:g} of its {self.device.memory_bytes / 1e9:.0f} GB"
            )

    @property
    def kv_tokens(self) -> float:
        """Recorded tokens that a rank's KV cache holds."""
        free = self.memory_share * self.device.memory_bytes - self._weight_bytes
        return free / self._kv_bytes_per_token / self.stretch

    def row_tokens(self, num_speculative_tokens: int) -> float:
        """Recorded tokens that would fill what the states of a request take of the KV cache."""
        states = self.model.states
        if states is None:
            return 0.0
        num_bytes = states.num_bytes(num_speculative_tokens, cached=True) / self.tensor_parallel
        return num_bytes / self._kv_bytes_per_token / self.stretch

    @property
    def head(self) -> Roofline:
        """One pass of a head that drafts for this model: a layer of its own kind, and its output layer."""
        layer = dataclasses.replace(self.model, num_layers=1, num_dense_layers=0, states=None)
        return dataclasses.replace(self, model=layer, host=None)

    def seconds(
        self,
        num_tokens: int,
        drafted: bool,
        num_context: int = 0,
        num_tokens_of_others: int = 0,
        num_rows: int = 0,
    ) -> float:
        """The seconds of a step of one rank, as `Times`; only the host cares for `drafted` and `num_rows`."""
        device, model = self.device, self.model
        read_bytes = self.stretch * num_context * self._kv_bytes_per_token
        read_bytes += self._state_bytes(num_tokens, num_rows, drafted)
        read_bytes += LOGIT_PASSES * _LOGIT_BYTES * num_tokens * model.vocab_size
        shared = model.shared_params / self.tensor_parallel
        seconds = self._product_seconds(shared, num_tokens * shared)
        seconds += self._expert_seconds(num_tokens + num_tokens_of_others)
        seconds += read_bytes / (device.memory_efficiency * device.bytes_per_s)
        seconds += self._collective_seconds(num_tokens) + model.num_layers * device.launch_s
        if self.host is not None:
            step_s, row_s = self.host[drafted]
            seconds += step_s + num_rows * row_s
        return self.stretch * seconds

    @property
    def without_drafter(self) -> Roofline:
        return dataclasses.replace(self, host=None)

    @property
    def _num_devices(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def _weight_bytes(self) -> float:
        model = self.model
        experts = model.num_experts * model.expert_params
        per_device = (model.num_params - experts) / self.tensor_parallel + experts / self._num_devices
        return per_device * model.bytes_per_value

    @property
    def _kv_bytes_per_token(self) -> float:
        """On a device: with more devices than KV heads every head is there more than once."""
        model = self.model
        heads = max(1, model.num_kv_heads // self.tensor_parallel)
        num_layers = model.num_layers - model.num_recurrent_layers
        return 2 * num_layers * heads * model.head_dim * model.bytes_per_value

    def _state_bytes(self, num_tokens: int, num_rows: int, drafted: bool) -> float:
        """Bytes of states read and written; a prompt's tokens write none but their last."""
        states = self.model.states
        if states is None:
            return 0.0
        num_written = min(num_tokens, num_rows * (1 + MAX_RECURRENT_TOKENS)) if drafted else num_rows
        return (num_rows + num_written) * states.num_layers * states.recurrent_bytes / self.tensor_parallel

    def _expert_seconds(self, num_tokens: int) -> float:
        """The experts, for the tokens of all ranks."""
        model, num_devices = self.model, self._num_devices
        if not model.num_experts:
            return 0.0
        touched = 1.0 - (1.0 - model.num_experts_per_token / model.num_experts) ** num_tokens
        if self.expert_parallel or self.data_parallel > 1:
            experts = _most(model.num_experts / num_devices, touched, num_devices)
        else:
            experts = touched * model.num_experts / num_devices
        num_products = num_tokens * model.num_experts_per_token / num_devices
        return self._product_seconds(experts * model.expert_params, num_products * model.expert_params)

    def _product_seconds(self, params: float, products: float) -> float:
        """Matrix products on one device: `params` that they read, `products` that they multiply."""
        device = self.device
        memory = params * self.model.bytes_per_value / (device.memory_efficiency * device.bytes_per_s)
        compute = 2 * products / (device.compute_efficiency * device.flops_per_s)
        return (memory**BLEND + compute**BLEND) ** (1 / BLEND)

    def _collective_seconds(self, num_tokens: int) -> float:
        """Two all-reduces a layer in a rank; between ranks, a token's way to its experts and back."""
        model, tp = self.model, self.tensor_parallel
        message = num_tokens * model.hidden_size * model.bytes_per_value
        seconds = 0.0
        if tp > 1:
            latency, bandwidth = self._link(tp)
            seconds += 2 * model.num_layers * (latency + 2 * (tp - 1) / tp * message / bandwidth)
        if self.data_parallel > 1:
            latency, bandwidth = self._link(self._num_devices)
            sent = message * model.num_experts_per_token / tp
            seconds += 2 * model.num_expert_layers * (latency + sent / bandwidth)
        return seconds

    def _link(self, num_devices: int) -> tuple[float, float]:
        device = self.device
        if num_devices <= device.node_size:
            return device.link_s, device.link_bytes_per_s
        return device.network_s, device.network_bytes_per_s


def _most(num_experts: float, share: float, num_devices: int) -> float:
    """Touched experts of the device that has most: of num_experts on each, a share is touched.

    The expected maximum of normal variables, as Blom (1958) approximates it.
    """
    above = NormalDist().inv_cdf((num_devices - 0.375) / (num_devices + 0.25)) if num_devices > 1 else 0.0
    return min(num_experts, num_experts * share + above * math.sqrt(num_experts * share * (1.0 - share)))
