"""Alembic's revisions of the schema; the server applies them when it starts."""
