"""Checking drafts against the target. `reference` is plain Python; the other files need torch."""
