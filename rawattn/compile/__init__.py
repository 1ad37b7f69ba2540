"""From CUDA C to a binary: NVRTC, and the cache of what it gave."""
