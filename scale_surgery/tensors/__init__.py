"""New tensors: blocks, and the values with which they begin."""
