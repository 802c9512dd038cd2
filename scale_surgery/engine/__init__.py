"""One model, any number of named expansions: the code that travels with checkpoints."""
