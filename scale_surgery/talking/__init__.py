"""A model that answers: generate for scripts, chat in a terminal, transformers' own server."""
