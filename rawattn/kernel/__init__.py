"""The Python face of each kernel, best first."""
