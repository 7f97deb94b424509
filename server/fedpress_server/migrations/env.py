"""How Alembic runs here: on the connection that the server, or the command line, hands over."""

from alembic import context

from fedpress_server.storage.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters few things in place
)
with context.begin_transaction():
    context.run_migrations()
