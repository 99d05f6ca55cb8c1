"""Step programs: what every rank does around a training step, verified before anything runs."""
