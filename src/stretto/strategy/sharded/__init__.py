"""Sharded data parallelism: a plan says what is kept and when everything travels."""
