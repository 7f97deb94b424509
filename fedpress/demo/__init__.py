"""`fedpress demo`: a server, ten devices, two tasks, one table."""
