"""This package makes a binary of CUDA C by NVRTC, and keeps it in memory and on disk."""
