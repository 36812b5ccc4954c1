"""Which tests are slow, their order, their log, the devices of those that ask for one, and a small disk."""

import importlib.util
import logging
import os
import subprocess

import pytest
from hypothesis import HealthCheck, Phase, settings

from rollout_spec.cli import main
from tests.engine.rollout_server import server_of  # noqa: F401

settings.register_profile("default", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("default")
# The same examples in every run; `make test-long` draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
# Of a mutant only matters whether it fails, not the smallest case.
settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)

# What `make test-ascend` brings.
collect_ignore = [] if importlib.util.find_spec("vllm_ascend") else ["ascend"]
TRAINING, LONG = "test_training.py", ("test_async_training.py", "test_faults.py")
# These come first, because they take torch for a GPU's: vLLM replaces parts of it where its CPU engine runs.
ON_A_GPU = ("device_waits", "host_drafts", "ascend")
# Then what takes longest, so that at the end no process works on while the others have nothing to do.
# The training takes most of the memory at its end: what starts a Ray of its own has ended by then.
LONGEST = (
    "training", "any_manager", "verl_history", "mrv2", "parallel", "requests", "model_drafter", "certify",
    "bench_host", "sampling",
)  # fmt: skip
FIRST = [f"test_{name}.py" for name in (*ON_A_GPU, *LONGEST)]


def pytest_configure():
    # vLLM's CPU engine compiles a function of its sampler in every process: 10 to 20 s for nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Two engines, two trainers and the tests beside them take much memory; Ray ends a worker at 95 %.
    os.environ.setdefault("RAY_memory_usage_threshold", "0.98")
    # Two processes of as many threads as there are cores would wait for one another.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Engines and a training are `slow`; what else trains is `long`."""
    for item in items:
        if item.path.name in LONG or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.long)
        elif item.path.name in (TRAINING, "test_any_manager.py") or item.path.parent.name == "engine":
            item.add_marker(pytest.mark.slow)
        if item.path.name == TRAINING:
            item.add_marker(pytest.mark.training)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


def pytest_generate_tests(metafunc):
    """`torch_device`: the CPU, and a GPU where there is one; nothing is left out where there is none."""
    if "torch_device" in metafunc.fixturenames:
        import torch

        metafunc.parametrize("torch_device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
    # What verl imports sets every handler of the process to ERROR.
    caplog.set_level(logging.WARNING)


@pytest.fixture
def refused(capsys):
    """`refused(*arguments)`: the line that the command says when it ends with exit code 2."""

    def run(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"rollout-spec {arguments[0]}")
        return line

    return run


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from tests.trainings import make_policy

    return make_policy(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of 64 KiB, or of what a test asks for (`indirect`)."""
    folder, size = tmp_path / "disk", getattr(request, "param", "64k")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a disk so small that it is full; CI is root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # what died there may still hold it
