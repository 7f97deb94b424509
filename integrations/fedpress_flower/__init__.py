"""Flower with fedpress: mods for clients in `client`, strategies for the server in `server`."""
