"""What the demo trains on."""
