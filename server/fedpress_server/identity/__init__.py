"""Identity: devices, operators, and the server's signing keys."""
