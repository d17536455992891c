"""Attention over history in blocks plus this step's own keys and values."""
