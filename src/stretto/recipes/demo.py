"""The embedded default: generated shapes, a small net, three minutes at most on two cores."""

DEMO = """\
# The run that `stretto demo` trains, once with 1 worker and once with 4.
[model]
kind = "cnn"
norm = "group"          # statistics of a sample, not of a batch: any number of workers is equal

[data]
kind = "shapes"
samples = 4096

[optim]
kind = "sgd"
lr = 0.05
warmup_steps = 20
decay = "cosine"

[train]
batch = 64              # over all workers together, however many they are
epochs = 4
"""
