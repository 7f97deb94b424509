"""Models that stay: versions, aliases, retention, and what a restore undid."""
