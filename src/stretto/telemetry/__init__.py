"""Events, spans and timelines of a run, and the sinks that print, store or upload them."""
