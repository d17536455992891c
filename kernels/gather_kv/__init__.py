"""Read the history of each request back as one dense tensor."""
