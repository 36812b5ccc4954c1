"""`rollout-spec bench native`, for benchmarks/record: python benchmarks/native.py --output FILE."""

import sys

from rollout_spec.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "native", *sys.argv[1:]]))
