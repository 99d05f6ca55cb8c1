"""Ranks and hosts of a job: launcher detection, the TCP store, rendezvous and heartbeats."""
