"""Data that comes with the library: small trained models and the text that they never saw. See README.md."""
