"""Kernels on a CPU."""
