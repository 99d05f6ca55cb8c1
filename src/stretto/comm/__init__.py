"""Transports between ranks, and the executors that run schedules and messages on them."""
