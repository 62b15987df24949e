"""How the model is spread over processes."""
