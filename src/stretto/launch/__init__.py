"""Start, supervise and end workers, on this machine or in a lab; write Slurm batch files."""
