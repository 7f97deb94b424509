"""Observability: logs, metrics and traces."""
