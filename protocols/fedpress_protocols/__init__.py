"""The wire: everything that both ends must agree on, bit for bit."""

__version__ = "0.1.0"
