"""Complete runs, ready made."""
