"""The scan of Mamba-1 over packed tokens, from state slots to state slots."""
