"""Where the server's truth is kept: the database's rows and the store's files."""
