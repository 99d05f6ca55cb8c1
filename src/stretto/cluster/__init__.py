"""Who we are and where we meet: `World`, found in the environment; the store."""
