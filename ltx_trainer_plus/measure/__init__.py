"""What a run costs, counted beforehand or measured."""
