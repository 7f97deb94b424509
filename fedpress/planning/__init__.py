"""Predicted costs of a task, profile by profile: fedpress plan."""
