"""What a running server lets its operators see: log lines, figures, traces."""
