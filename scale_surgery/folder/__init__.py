"""A model folder of ours as a value: open it, check it, write it."""
