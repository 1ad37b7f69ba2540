"""This package calls the CUDA driver: devices, launches, graphs, counters."""
