"""The flow-matching objective: noise levels, positions, inference schedule."""
