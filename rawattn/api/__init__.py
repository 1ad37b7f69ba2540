"""This package has the functions that people call."""
