"""Models to try kvgroups on: tiny seeded ones of every family, and a small trained one."""

from kvgroups.testing.gemma import load_gemma_3_270m
from kvgroups.testing.tiny import tiny, tiny_names

__all__ = ["load_gemma_3_270m", "tiny", "tiny_names"]
