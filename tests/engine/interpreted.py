"""Run `main` of a module where Triton is interpreted from the start, and write as JSON what it gives:

python -m tests.engine.interpreted FILE MODULE ARGUMENT ...
"""

# ruff: noqa: I001 (what is imported depends on what comes before)
import tests.engine.interpreted_triton  # noqa: F401

import importlib
import json
import pathlib
import sys

module = importlib.import_module(sys.argv[2])  # also in the processes that it spawns
if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps(module.main(*sys.argv[3:])))
