"""Training: anchors, losses, optimizer, step, checkpoints, loop."""
