"""`python -m rollout_spec.cli`."""

import sys

from rollout_spec.cli import main

sys.exit(main())
