"""The laboratory beside the product: the demo, verl on CPUs, benchmarks, gpu-check and studies.

May import: `verl_cpu`, hydra, psutil. The product never imports it.
"""

__version__ = "0.1.0"
