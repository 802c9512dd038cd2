"""A model in memory: load it, read its texts, probe it, measure its loss, freeze it."""
