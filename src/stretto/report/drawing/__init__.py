"""Schedules as pictures: who sends what to whom and when, for a terminal and as SVG."""
