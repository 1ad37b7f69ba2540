"""The CUDA driver: devices, launches, graphs, counters."""
