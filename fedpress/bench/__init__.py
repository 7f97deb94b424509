"""Measurements of a user's own machine and updates: `fedpress bench`."""
