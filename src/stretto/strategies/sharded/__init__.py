"""Sharded data parallelism (ZeRO 1 to 3): a plan says what is sharded and when it is sent."""
