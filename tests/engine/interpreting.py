"""Processes whose Triton is interpreted from the start, and what tests with them share."""

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from rollout_spec.vllm.refusals.checks import mrv2_misfit
from rollout_spec.vllm.versions import version

OLD, ON_MRV1 = version() == "0.23.0", "with vLLM 0.23 our drafter runs on MRV1 alone"
NEEDS_MRV2 = pytest.mark.skipif(OLD and mrv2_misfit() is not None, reason=ON_MRV1)
WITH_GRAPHS = pytest.mark.skipif(OLD, reason=ON_MRV1)


def interpreted(module, path, *given, **environment):
    """What `main` of a module gives, in a process of its own."""
    command = [sys.executable, "-m", "tests.engine.interpreted", str(path), module, *given]
    env = {**os.environ, **environment}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(path.read_text())


@contextlib.contextmanager
def scenarios(module, *given, first="tests.engine.interpreted_triton"):
    """`scenario(name)` of a module. One process runs each, when it is first asked for."""
    begin = {"initializer": importlib.import_module, "initargs": (first,)}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **begin) as process:
        begun = functools.cache(lambda name: process.submit(_in_process, module, name, *given))
        yield lambda name: begun(name).result()


def _in_process(module, *given):
    return json.loads(json.dumps(importlib.import_module(module).scenario(*given)))


def on_cuda(models):
    """The scenarios of `interpreted_graphs`."""
    return scenarios("tests.engine.interpreted_graphs", str(models), first="tests.engine.interpreted_cuda")


def assert_stopped(found, sampled):
    """A request with a stop string got what came before it."""
    stop, stopped = found["stop"], found["stopped"]
    assert stopped["end"] == ["stop", stop]
    assert stopped["text"] == sampled["text"].partition(stop)[0]
    assert stopped["tokens"] == sampled["tokens"][: len(stopped["tokens"])]
