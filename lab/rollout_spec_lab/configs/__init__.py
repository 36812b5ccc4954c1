"""Hydra groups of the demo; `verl_plugin` puts them on Hydra's search path."""
