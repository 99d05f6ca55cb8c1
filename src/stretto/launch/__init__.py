"""Start, watch and end workers: on this machine, or in a cluster in a box."""
