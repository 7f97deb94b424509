"""Who is who: devices, operators, and the keys that this server signs with."""
