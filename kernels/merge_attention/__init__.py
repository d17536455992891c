"""Attention over parts of a context, joined into attention over all of it."""
