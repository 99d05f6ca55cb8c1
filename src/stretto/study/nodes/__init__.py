"""Step times by number of hosts: predicted, and measured in a lab."""
