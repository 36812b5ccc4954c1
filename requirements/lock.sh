#!/bin/sh
# Write what each environment has, NAME.txt, from what it asks for, NAME.in: `make lock`.
# A version that still fits stays; --upgrade takes the newest. "Locked with FILE." in a NAME.in: that overrides it.
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

for file in *.in; do
    name=${file%.in}
    [ "$name" = development ] || lock $(sed -n 's/^# Locked with \(.*\.overrides\)\.$/--override \1/p' "$file") "$@"
done
