"""Rounds as they happen: every task's state, its steps, and who does them."""
