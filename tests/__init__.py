import os

# A check of verl's configuration looks for the policy, and would wait for a hub out of reach. Read at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
