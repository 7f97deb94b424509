"""Arrays to bytes and back: compressors, the entropy coder and their kernels. Usable on its own."""
