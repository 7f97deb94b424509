"""Compressed exchange of gradients between the processes of PyTorch's data parallelism."""
