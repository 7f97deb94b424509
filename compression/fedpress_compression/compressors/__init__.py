"""Lossy: vectors to symbols and back. A new method is one new file in this folder."""
