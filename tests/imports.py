"""Import every module of the product and of the laboratory: `make cuda-imports`, with vLLM's CUDA build."""

import importlib
import pkgutil
from pathlib import Path

import rollout_spec
import rollout_spec_lab
from rollout_spec.vllm.mrv1.sampler import check_samplers

if __name__ == "__main__":
    names = [
        module.name
        for package in (rollout_spec, rollout_spec_lab)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    ]
    for name in names:
        importlib.import_module(name)
    check_samplers()
    print(f"{len(names)} modules import, and the engine patches fit ({Path(rollout_spec.__file__).parent})")
