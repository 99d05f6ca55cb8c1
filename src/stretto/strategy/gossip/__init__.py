"""Gossip: every rank has a model of its own and averages it with a few peers, step by step."""
