"""User-level differential privacy: terms' cost, integer noise, and the grid that it is added on."""
