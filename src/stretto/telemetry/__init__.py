"""What happened, and when: spans and timelines, events, and the sinks that tell or keep them."""
