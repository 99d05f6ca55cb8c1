"""Training: the loop and its parts."""
