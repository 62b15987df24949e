"""Log lines, Weights & Biases, progress."""
