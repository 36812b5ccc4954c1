#!/bin/sh
# Write what each environment has, NAME.txt, from what it asks for, NAME.in: `make lock`.
# A version that still fits stays; --upgrade takes the newest.
set -eu
cd "$(dirname "$0")"
trap 'rm -f ./*.new' EXIT
export UV_CUSTOM_COMPILE_COMMAND="make lock"

lock() { # of $name, with arguments for uv
    [ ! -e "$name.txt" ] || cp "$name.txt" "$name.new" # whoever installs meanwhile reads a whole file
    # Wheels only, but for antlr4: it is plain Python, and published without a wheel.
    uv pip compile --quiet --no-config --no-annotate --universal --python-version 3.11 \
        --only-binary :all: --no-binary antlr4-python3-runtime "$@" "$name.in" --output-file "$name.new"
    mv "$name.new" "$name.txt"
}

for name in docs mutants; do lock "$@"; done
for name in cuda; do lock --override unwanted.overrides "$@"; done
for name in cpu vllm-0.23.0; do lock --override torch-2.11.overrides "$@"; done
for name in vllm-0.29.0 vllm-0.32.0; do lock --override torch-2.13.overrides "$@"; done
