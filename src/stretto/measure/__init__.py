"""Measuring: contenders interleaved in one run, peers at their best setting, and the bound."""
