"""Drafters that draft with a network, one file for each way of doing so. They need torch."""
