"""Model types of transformers, each taken through the whole program as a tiny model: python -m tests.sweep."""
