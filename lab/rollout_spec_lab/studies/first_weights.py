"""The weights that an engine begins with (FIRST_WEIGHTS in native/evidence.c), learned from recordings.

    python lab/rollout_spec_lab/studies/first_weights.py SPECDECODE_CHECKOUT RECORDING...

Builds a copy of the core in which every token and every coalition of experts shares one set of weights, and
replays the recordings with it: each line with a fresh index, with a model and without, and with the weights
that the line before left. So what is learned is what an engine should begin with. Prints the sums over the
selectors, in the order of the experts. Of the benchmark it takes the requests 40 to 100 of gsm8k and
instructcoder with EAGLE's drafts; of a recording the lines 10 to 20, two responses of each, with a model that
is right in 0.75, 0.65, 0.55 of the places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
RATES = (0.75, 0.65, 0.55)
LEARNING_RATES = (1.0, 0.3)  # of a pass over all lines, as shares of the core's
EXPORTS = """
static float rate_share = 1.0F;
static rs_weights shared[3];
static bool is_set;
void rs_study_set(const float *weights, float share) {
    memcpy(shared, weights, sizeof shared);
    is_set = true;
    rate_share = share;
}
void rs_study_get(const rs_index *index, float *weights) {
    memcpy(weights, index->calibration.weights, sizeof shared);
}
"""
DECLARED = (
    "void rs_study_set(const float *w, float share);\nvoid rs_study_get(const rs_index *i, float *w);\n"
)


def build(folder: Path) -> None:
    """The package with such a core."""
    for name in ("native", "rollout_spec", "setup.py", "pyproject.toml", "README.md", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    core, header = folder / "native/evidence.c", folder / "native/rollout_spec_native.h"
    text = core.read_text()
    chosen = re.compile(r"    sets\[0\] = token_hash.*?(?=\n})", re.DOTALL)
    text = chosen.sub(
        "    (void)proposed;\n    (void)prediction;\n    (void)candidate;\n"
        "    for (uint32_t i = 0; i < RS_NUM_SELECTORS; i++) {\n        sets[i] = i;\n    }",
        text,
    )
    text = text.replace("LEARNING_RATE * error", "rate_share * LEARNING_RATE * error")
    text = text.replace(
        "    set_priors(calibration);\n}",
        "    set_priors(calibration);\n    if (is_set) {\n"
        "        memcpy(calibration->weights, shared, sizeof shared);\n    }\n}",
    )
    first = text.index("/* ---- cells ---- */")
    core.write_text(text[:first] + '#include "index.h"\n' + EXPORTS + text[first:])
    declared = header.read_text()
    first = declared.index("rs_status rs_index_new")
    header.write_text(declared[:first] + DECLARED + declared[first:])
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip


def lines_of(checkout: Path, recordings: list[Path]) -> Iterator[Any]:
    """One of each source in turn."""
    from rollout_spec.predict.model_drafts import simulate_model
    from rollout_spec.trace import read_trace
    from rollout_spec_lab.bench.specdecode import read, with_eagle

    sources = [list(with_eagle(read(checkout, name)[40:100], 3)) for name in ("gsm8k", "instructcoder")]
    for file in recordings:
        lines = itertools.islice(read_trace(file), 10, 20)
        two_each = [dataclasses.replace(line, responses=line.responses[:2]) for line in lines]
        sources.append(list(simulate_model(two_each, RATES)))
    return (line for turn in itertools.zip_longest(*sources) for line in turn if line is not None)


def learn(lines: list[Any]) -> np.ndarray:
    """[3, 2, experts] and biases, [3, 1], flat: [3, n]."""
    from rollout_spec.config import SpecConfig
    from rollout_spec.drafting.native import ffi, lib
    from rollout_spec.predict.replay import IndexProposer, ReplayResult, replay_line

    config = SpecConfig(num_speculative_tokens=15, min_survival=0.05, history=0)
    weights = np.full((3, 21), 0.1, np.float32)
    weights[:, -1] = 0.0
    place = ffi.cast("float *", weights.ctypes.data)
    for share, line, mixes in itertools.product(LEARNING_RATES, lines, (True, False)):
        lib.rs_study_set(place, share)
        with contextlib.closing(IndexProposer(config, mixes=mixes)) as proposer:
            replay_line(proposer, line, (), config.num_speculative_tokens, ReplayResult())
            lib.rs_study_get(proposer.index._index, place)
    return weights


def main(checkout: str, *recordings: str) -> None:
    if "ROLLOUT_SPEC_STUDY" not in os.environ:
        with tempfile.TemporaryDirectory() as name:
            build(Path(name))
            path = os.pathsep.join((name, str(ROOT / "lab")))
            environment = os.environ | {"PYTHONPATH": path, "ROLLOUT_SPEC_STUDY": "1"}
            subprocess.run([sys.executable, __file__, checkout, *recordings], env=environment, check=True)
        return
    sums = learn(list(lines_of(Path(checkout), [Path(each) for each in recordings]))).sum(axis=0)
    for title, part in (("own token", sums[:10]), ("other token", sums[10:20]), ("bias", sums[20:])):
        print(f"{title}: {', '.join(f'{value:.2f}' for value in part)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
