"""What has become of our plugin for verl in this process."""

from rollout_spec.config import SpecConfig

failure: str | None = None  # why this process has no plugin
spec = SpecConfig()  # the options of the configuration that this process has checked last
