"""A model that answers: generate for scripts, chat in a terminal, and which path each token came from."""
