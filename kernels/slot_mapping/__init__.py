"""Where each token of this step is stored, in every KV-cache group."""
