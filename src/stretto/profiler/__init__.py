"""Measure step times, memory peaks, model units, links, and slowdown by communication."""
