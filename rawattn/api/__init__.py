"""The functions that people call."""
