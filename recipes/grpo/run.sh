#!/usr/bin/env bash
# GRPO on a machine without an accelerator; arguments are Hydra overrides (rollout.spec=off trains without drafts).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../prepare.sh"
exec python -m verl.trainer.main_ppo --config-path "$here" --config-name grpo "$@"
