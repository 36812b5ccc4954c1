"""Faults of vLLM that we fix, a module each: a file is deleted when its Patch's `until` has come.

In: a module of vLLM. Out: the same module, patched where it is wrong; a PatchError where it is not the one
that the fix knows. Each file has `PATCH`; `WHERE`, the module that is wrong, by the engines that need it
right; `fix`, which mends the module, and may do so again; and `applies`, if not every vLLM has the fault.
`fixes` finds them by itself. They never draw a token and, but for `refused_requests`, know no drafter.
May import: `patches`, `recurrent`, `vllm.options`, `vllm.prompt_rows`, numpy, torch, vllm.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

# Which engines need a fix. Where it does not fit, ALL keep vLLM's fault, which they have without drafts too.
# Any others are refused: drafts would change what a request gets.
ALL = "all"
WITH_DRAFTS = "with drafts"
RECURRENT_MRV1 = "recurrent on MRV1"
RECURRENT_MRV2 = "recurrent on MRV2"


def fixes(*engines: str) -> list[tuple[ModuleType, str]]:
    """The fixes for these engines, each with the name of the module that it mends."""
    names = (f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__))
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
        for fix, name in fixes(RECURRENT_MRV2 if is_mrv2 else RECURRENT_MRV1):
            apply(fix, importlib.import_module(name))
