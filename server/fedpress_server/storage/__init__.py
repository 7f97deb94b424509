"""Storage: the database's rows and the store's files."""
