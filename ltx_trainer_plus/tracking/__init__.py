"""Metrics, Weights & Biases, progress."""
