"""Training: the loop on one screen, and its pieces."""
