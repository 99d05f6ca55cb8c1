"""What a training step of a run would take: from its settings to prices on a described cluster."""
