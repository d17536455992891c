"""Store this step's keys and values in their slots."""
