"""Bring the changed entries of a block table to its device."""
