"""Training the new tensors, and choosing the layers that are worth it."""
