"""Policies over rounds: which profile each round has, and each client of it."""
