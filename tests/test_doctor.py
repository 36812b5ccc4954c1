"""`rollout-spec doctor`: what it says of an installation, right or broken."""

import json
import subprocess
import sys

import pytest
from vllm.platforms import current_platform

from rollout_spec.cli import main
from rollout_spec.doctor import diagnosis


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
    found = {"a": diagnosis.OK, "patch p": diagnosis.OK, "b": diagnosis.WARN, "patch q": diagnosis.FAIL}
    checks = [diagnosis.Check(name, status, "why", "do") for name, status in found.items()]
    monkeypatch.setattr(diagnosis, "diagnose", lambda: iter(checks))
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["fail patch q why; do", "warn b why; do", "ok a why; do"]
    assert lines[3].startswith("ok patches 1 applied")
    assert lines[4:] == ["Drafting cannot work here: patch q."]


@pytest.mark.parametrize(
    ("version", "status", "state"),
    [
        ("0.24.0", diagnosis.OK, "tested"),
        ("0.32.0+cpu", diagnosis.WARN, "tested without verl"),
        ("0.30.0", diagnosis.WARN, "not tested: judged by guards at start"),
        ("0.1.dev7", diagnosis.WARN, "not tested: judged by guards at start"),  # a build without tags
        ("0.22.1", diagnosis.FAIL, "refused: too old"),
        ("0.33.0", diagnosis.FAIL, "refused: newer than what was tested"),
        ("1.0.0", diagnosis.FAIL, "refused: newer than what was tested"),
    ],
)
def test_doctor_says_what_is_known_of_a_vllm(version, status, state):
    check = diagnosis._known("vllm", version)
    assert (check.status, check.detail) == (status, f"{version} ({state})")


def test_doctor_warns_where_drafts_cost_a_gpu_its_asynchronous_scheduling():
    costs = ": MRV1 gives up asynchronous scheduling for drafts"
    for given, detail, is_free in (
        ((None, None), "MRV2 where Triton runs, else MRV1", True),
        ((None, {"B", "A"}), "MRV2 where Triton runs for A, B; MRV1 for other models", False),
        (("it", None), "MRV1, because MRV2 cannot be used: it", False),
    ):
        on_gpu, on_cpu = (diagnosis._model_runner(*given, is_cpu=is_cpu) for is_cpu in (False, True))
        assert (on_cpu.status, on_cpu.detail) == (diagnosis.OK, detail)
        assert on_gpu.status == (diagnosis.OK if is_free else diagnosis.WARN)
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
    [check] = [one for one in json.loads(done.stdout)["checks"] if one["name"] == name]
    assert (done.returncode, check["status"], check["detail"]) == (1, "fail", detail)


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
    failed = [check for check in diagnosis._entry_points() if check.status == diagnosis.FAIL]
    assert [check.detail for check in failed] == ([f"{variable}={value} excludes it"] if fails else [])
    assert all(variable in check.fix for check in failed)


@pytest.mark.parametrize(("wanted", "num_warnings"), [("1", 1), ("0", 0)])
def test_doctor_says_that_vllms_sampler_wants_flashinfer(monkeypatch, wanted, num_warnings):
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", wanted)
    monkeypatch.setattr(diagnosis, "package_version", lambda name: None)
    found = list(diagnosis._sampler())
    assert [(check.name, check.status) for check in found] == [("flashinfer", "warn")] * num_warnings


@pytest.mark.parametrize(
    ("mode", "is_cuda", "status", "detail"),
    [
        ("0", True, diagnosis.OK, "off: with drafts you get the tokens without them, up to rounding"),
        ("1", True, diagnosis.OK, "certify judges bit for bit"),
        ("1", False, diagnosis.WARN, "CUDA and ROCm only"),
    ],
)
def test_doctor_says_what_the_batch_invariant_mode_covers(monkeypatch, mode, is_cuda, status, detail):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: is_cuda)
    (check,) = diagnosis._batch_invariance()
    assert check.status == status and detail in check.detail
