"""Alembic's environment: migrations run on the connection of the caller."""

from alembic import context

from fedpress_server.storage.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters few things in place
)
with context.begin_transaction():
    context.run_migrations()
