"""One token per request through the recurrence of Mamba-1 or Mamba-2, in place on state slots."""
