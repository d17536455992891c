"""The scan of Mamba-2 over packed tokens, from state slots to state slots."""
