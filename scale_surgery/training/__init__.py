"""Training of the new tensors, and the choice of the layers worth expanding."""
