"""A model in memory: load it, tokenize for it, add to its tokens, probe it, measure its loss, freeze it."""
