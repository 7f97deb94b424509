"""The model registry: versions, aliases, retention, and rounds undone by a restore."""
