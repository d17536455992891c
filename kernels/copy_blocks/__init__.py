"""Copy whole blocks, all layers of a KV-cache group at once."""
