"""The Python face of each kernel, and what they share."""
