# Sourced by the launch scripts: the demo's model and data, and where the run's metrics go.
export ROLLOUT_SPEC_DEMO_DIR=${ROLLOUT_SPEC_DEMO_DIR:-$PWD/outputs/demo}
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$ROLLOUT_SPEC_DEMO_DIR/metrics.jsonl}
export WANDB_MODE=${WANDB_MODE:-offline}
# Without byte code every process of the run compiles its imports again.
unset PYTHONDONTWRITEBYTECODE
python - "$ROLLOUT_SPEC_DEMO_DIR" <<'PYTHON'
import sys
from pathlib import Path

from rollout_spec.demo.data import make_data
from rollout_spec.demo.model import make_model

folder = Path(sys.argv[1])
make_model(folder / "model")
make_data(folder)
PYTHON
