#!/usr/bin/env bash
# DAPO: run.sh [SIZE [DEVICE]] [HYDRA OVERRIDES...]; SIZE cpu (default), qwen3_8b, qwen3_32b or qwen3_235b,
# DEVICE gpu (default) or npu; rollout.spec=off trains without drafts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
launch dapo "$@"
