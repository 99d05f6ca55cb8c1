"""Collectives as values: schedules, the algorithms that make them, their proof, and codecs."""
