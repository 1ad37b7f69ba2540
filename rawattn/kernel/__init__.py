"""The Python tiling of each kernel, and what they share."""
