"""Models to try kvgroups on: tiny seeded ones of every family, and small trained ones."""

from kvgroups.testing.gemma import load_gemma_3_270m
from kvgroups.testing.tiny import tiny, tiny_names
from kvgroups.testing.trained import trained, trained_names

__all__ = ["load_gemma_3_270m", "tiny", "tiny_names", "trained", "trained_names"]
