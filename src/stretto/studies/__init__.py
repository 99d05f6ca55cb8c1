"""Studies: complete comparisons made by one command."""
