"""How accuracy holds up as workers or batches grow: virtual workers, rate by rate, seed by seed."""
