"""`rollout-spec doctor`: what it says of an installation, right or broken."""

import json
import subprocess
import sys

import pytest
from vllm.platforms import current_platform

from rollout_spec.cli import main
from rollout_spec.doctor import check, diagnosis, patched


def doctor(code, *arguments):
    code = f"import sys; {code}; from rollout_spec.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, "doctor", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_doctor_says_that_drafting_works_here():
    done = doctor("pass", "--json")
    report = json.loads(done.stdout)
    assert not [check for check in report["checks"] if check["status"] == "fail"]
    assert (done.returncode, report["works"]) == (0, True)
    assert {check["name"] for check in report["checks"]} >= {
        *("python", "verl", "torch", "device", "native module", "vllm.general_plugins", "rollout.spec"),
        *("patch vllm-keyed-sampler", "patch vllm-coupled-verification", "patch vllm-min-tokens-bonus"),
        *("patch vllm-kept-logprobs", "patch vllm-plain-graphs", "patch vllm-rows-end-apart"),
        *("patch verl-named-calls", "patch vllm-groups-by-rank", "patch verl-private-methods"),
    }


def test_doctor_prints_what_is_wrong_first_and_only_counts_patches_that_apply(monkeypatch, capsys):
    found = {"a": check.OK, "patch p": check.OK, "b": check.WARN, "patch q": check.FAIL}

    def probe():
        yield from (check.Check(name, status, "why", "do") for name, status in found.items())
        raise OSError("broken")

    monkeypatch.setattr(diagnosis, "PROBES", [("c", probe)])
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["fail patch q why; do", "fail c OSError: broken", "warn b why; do", "ok a why; do"]
    assert lines[4].startswith("ok patches 1 applied")
    assert lines[5:] == ["Drafting cannot work here: patch q, c."]


@pytest.mark.parametrize(
    ("version", "status", "state"),
    [
        ("0.24.0", check.OK, "tested"),
        ("0.32.0+cpu", check.WARN, "tested without verl"),
        ("0.30.0", check.WARN, "not tested: judged by guards at start"),
        ("0.1.dev7", check.WARN, "not tested: judged by guards at start"),  # a build without tags
        ("0.22.1", check.FAIL, "refused: too old"),
        ("0.33.0", check.FAIL, "refused: newer than what was tested"),
        ("1.0.0", check.FAIL, "refused: newer than what was tested"),
    ],
)
def test_doctor_says_what_is_known_of_a_vllm(version, status, state):
    known = diagnosis._known("vllm", version)
    assert (known.status, known.detail) == (status, f"{version} ({state})")


def test_doctor_warns_where_drafts_cost_a_gpu_its_asynchronous_scheduling():
    costs = ": MRV1 gives up asynchronous scheduling for drafts"
    for given, detail, is_free in (
        ((None, None), "MRV2 where Triton runs, else MRV1", True),
        ((None, {"B", "A"}), "MRV2 where Triton runs for A, B; MRV1 for other models", False),
        (("it", None), "MRV1, because MRV2 cannot be used: it", False),
    ):
        on_gpu, on_cpu = (patched._model_runner(*given, is_cpu=is_cpu) for is_cpu in (False, True))
        assert (on_cpu.status, on_cpu.detail) == (check.OK, detail)
        assert on_gpu.status == (check.OK if is_free else check.WARN)
        assert on_gpu.detail == detail + ("" if is_free else costs)


@pytest.mark.parametrize(
    ("module", "name", "detail"),
    [
        ("torch", "device", "needs torch, which is not installed"),
        ("rollout_spec.drafting._native", "native module", "rollout_spec.drafting._native is not built"),
    ],
)
def test_doctor_names_what_cannot_be_imported(module, name, detail):
    done = doctor(f"sys.modules['{module}'] = None", "--json")
    [found] = [one for one in json.loads(done.stdout)["checks"] if one["name"] == name]
    assert (done.returncode, found["status"], found["detail"]) == (1, "fail", detail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "line"),
    [
        ("client", "patch_clients", ("patch verl-named-calls", "warn", "does not fit this verl")),
        ("server", "guard_ranks", ("patches", "fail", "PatchError: other")),
    ],
)
def test_doctor_says_which_patch_does_not_fit_verl(module, name, line):
    imported = f"from rollout_spec.patches import PatchError; from rollout_spec.verl import {module}"
    done = doctor(
        f"{imported}\ndef unfit(_): raise PatchError('other')\n{module}.{name} = unfit\nimport sys", "--json"
    )
    said = done.stdout[done.stdout.index("{") :]  # vLLM was imported before the command could quiet it
    found = [tuple(one.values())[:3] for one in json.loads(said)["checks"]]
    assert line in found and [one for one, *_ in found].count(line[0]) == 1


@pytest.mark.parametrize(
    ("variable", "value", "fails"),
    [
        ("VLLM_PLUGINS", "other", True),
        ("VLLM_PLUGINS", "other, rollout_spec", False),
        ("VERL_USE_EXTERNAL_PLUGINS", "none", True),
        ("VERL_USE_EXTERNAL_PLUGINS", "auto", False),
        ("VERL_USE_EXTERNAL_PLUGINS", "rollout_spec", False),
    ],
)
def test_doctor_sees_plugins_that_are_shut_out(monkeypatch, variable, value, fails):
    for name in diagnosis.ENTRY_POINTS.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    failed = [one for one in diagnosis._entry_points() if one.status == check.FAIL]
    assert [one.detail for one in failed] == ([f"{variable}={value} excludes it"] if fails else [])
    assert all(variable in one.fix for one in failed)


@pytest.mark.parametrize(("wanted", "num_warnings"), [("1", 1), ("0", 0)])
def test_doctor_says_that_vllms_sampler_wants_flashinfer(monkeypatch, wanted, num_warnings):
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", wanted)
    monkeypatch.setattr(diagnosis, "package_version", lambda name: None)
    found = list(diagnosis._sampler())
    assert [(one.name, one.status) for one in found] == [("flashinfer", "warn")] * num_warnings


@pytest.mark.parametrize(
    ("mode", "is_cuda", "status", "detail"),
    [
        ("0", True, check.OK, "off: with drafts you get the tokens without them, up to rounding"),
        ("1", True, check.OK, "certify judges bit for bit"),
        ("1", False, check.WARN, "CUDA and ROCm only"),
    ],
)
def test_doctor_says_what_the_batch_invariant_mode_covers(monkeypatch, mode, is_cuda, status, detail):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: is_cuda)
    (found,) = diagnosis._batch_invariance()
    assert found.status == status and detail in found.detail
