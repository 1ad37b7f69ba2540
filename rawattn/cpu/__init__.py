"""This package has the kernels of a CPU."""
