"""Gossip: each rank, or group of ranks, trains a model and averages it with a few peers."""
