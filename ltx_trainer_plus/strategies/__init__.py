"""What a training batch asks of the model."""
