"""Asynchronous gossip: pairs of ranks average beside their steps, and no round holds anybody up."""
