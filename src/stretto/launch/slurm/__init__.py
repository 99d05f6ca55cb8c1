"""Batch jobs for Slurm: `job` says what the sbatch file reads, `submit` hands it in."""
