"""The environment of a CPU engine's process."""

import os
import sys


def engine_environment() -> dict[str, str]:
    """What vLLM needs on the CPU: Intel's OpenMP where it is installed, and no reserved core.

    vLLM's default binding keeps one core free for the scheduler, which waits while the model runs. With
    VLLM_ENABLE_V1_MULTIPROCESSING=0 it accepts distributed_executor_backend=uni: the model then runs in
    the engine's process. verl's default (mp) stays possible.
    """
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    preload, found = os.environ.get("LD_PRELOAD", ""), dict[str, str]()
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    if "omp" not in preload and os.path.exists(library):
        # Milliseconds of spinning after a parallel region; vLLM's own choice when it binds the threads.
        defaults["KMP_BLOCKTIME"] = "5"
        found["LD_PRELOAD"] = ":".join(filter(None, (preload, library)))
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | found
