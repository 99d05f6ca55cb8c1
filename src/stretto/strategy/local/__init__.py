"""Local updates: every rank steps by itself, and every so many steps all begin again together."""
