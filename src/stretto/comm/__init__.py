"""Communication: schedules, their proofs, channels to run them on, and buckets of tensors."""
