"""Uploads on their way in: whole, by parts, or a masked session's messages."""
