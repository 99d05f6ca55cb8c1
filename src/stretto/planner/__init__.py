"""Plans: which unit is sharded how, and when each of its communications may start."""
