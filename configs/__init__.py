"""Hydra configuration groups; see hydra_plugin."""
