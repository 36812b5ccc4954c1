"""What do drafts gain while other work keeps cores busy, as a training beside the rollouts does? In turns.

    python -m rollout_spec_lab.studies.beside_work [--busy 1] [--seconds 120] [--max-tokens 256]

So many processes multiply matrices without end, while the demo's policy serves the demo's prompts with drafts
off and on in turns (`demo.turns`): 2 prompts x 8 responses in each pair, 16 at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_spec.cli.inputs import device_arguments, number, tokenized
from rollout_spec_lab.bench.engine import Load, Plan
from rollout_spec_lab.cli.inputs import default_dtype, model_folder
from rollout_spec_lab.demo.data import make_rows
from rollout_spec_lab.demo.report import headline
from rollout_spec_lab.demo.turns import METHODS, serve_in_turns

NUM_PROMPTS, SIZE = 64, 2
WORK = "import numpy; a = numpy.random.rand(512, 512)\nwhile True: a @ a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--busy", type=number(int, 0), default=1, help="processes of such work (1)")
    parser.add_argument("--seconds", type=number(float, 0), default=120.0, help="four pairs at least (120)")
    parser.add_argument("--max-tokens", type=number(int, 1), default=256, help="of a response (256)")
    arguments = parser.parse_args()
    dtype = default_dtype()
    model = model_folder(None, dtype)
    prompts = tokenized(model, make_rows(NUM_PROMPTS, 7, "train"))
    most = arguments.max_tokens
    load = Load(prompts, group_size=8, max_tokens=most, natural_ends=True, temperature=0.7)
    engine = {"max_num_seqs": 16, "max_model_len": max(map(len, prompts)) + most} | device_arguments()
    plan = Plan(load=load, methods=METHODS, model=model, dtype=dtype, engine=engine, spec={})
    with contextlib.ExitStack() as stack:
        for _ in range(arguments.busy):
            one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            work = stack.enter_context(subprocess.Popen([sys.executable, "-c", WORK], env=one_core))
            stack.callback(work.kill)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout_spec_")))
        turns = serve_in_turns(plan, SIZE, arguments.seconds, folder)
    print(f"{arguments.busy} busy: {headline(turns)}, {turns.tokens_per_step:.2f} tokens per step, "
          f"{turns.acceptance_rate:.0%} accepted; {turns.agreement.num_identical:,} of "
          f"{turns.agreement.num_tokens:,} tokens the same; seconds off and on:",
          *(f"{off:.1f} {on:.1f}," for off, on in turns.seconds))  # fmt: skip


if __name__ == "__main__":
    main()
