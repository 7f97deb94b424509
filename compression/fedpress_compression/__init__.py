"""Compressors, the entropy coder and their kernels: arrays to bytes and back. Usable on its own."""
