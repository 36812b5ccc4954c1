"""`python -m rollout_spec_lab.cli`."""

import sys

from rollout_spec_lab.cli import main

sys.exit(main())
