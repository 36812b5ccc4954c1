"""Finds the fixes of `upstream` that an engine needs, and applies them."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from rollout_spec.vllm import upstream


def needed_by(*engines: str) -> list[tuple[ModuleType, str]]:
    """The fixes for these engines, each with the name of the module that it is given."""
    names = (f"{upstream.__name__}.{each.name}" for each in pkgutil.iter_modules(upstream.__path__))
    found = [importlib.import_module(name) for name in names]
    return [(fix, fix.WHERE[each]) for each in engines for fix in found if each in fix.WHERE]


def applies(fix: ModuleType, module: ModuleType) -> bool:
    """Whether the installed vLLM has the fault: asks the fix's own `applies`. Without it, every vLLM has."""
    has_fault = getattr(fix, "applies", None)
    return has_fault is None or bool(has_fault(module))


def apply(fix: ModuleType, module: ModuleType) -> None:
    """Apply the fix where vLLM has the fault; raises what `fix` does."""
    if applies(fix, module):
        fix.fix(module)


def fix_recurrent_states(vllm_config: Any) -> None:
    """Fix what vLLM does with the states of a worker's recurrent layers, if it drafts; it has its runner.

    Raises PatchError: the installed vLLM is not one that the fixes were written for.
    """
    if vllm_config.model_config.is_hybrid and vllm_config.speculative_config is not None:
        is_mrv2 = vllm_config.use_v2_model_runner
        for fix, name in needed_by(upstream.RECURRENT_MRV2 if is_mrv2 else upstream.RECURRENT_MRV1):
            apply(fix, importlib.import_module(name))
