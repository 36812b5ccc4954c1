"""The laboratory beside the product: the demo, verl on CPUs, benchmarks, gpu-check and studies.

It imports `rollout_spec`; the product never imports it.
"""

__version__ = "0.1.0"
