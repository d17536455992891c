"""Read and write the recurrent states of a step's requests."""
