"""The lab: a cluster emulated on one machine, with network namespaces as hosts and shaped links.

`spec` defines a lab and the commands that build it. `namespaces` builds it, removes it, and clears
what killed labs left behind. `run_in_lab` runs ranks inside it and sums up their traffic.
"""
