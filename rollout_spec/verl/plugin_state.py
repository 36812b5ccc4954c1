"""What has become of our plugin for verl in this process."""

failure: str | None = None
"""Why this process has no plugin."""
