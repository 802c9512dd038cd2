"""Answers of a model: `generate` for scripts, `chat` in a terminal, and transformers' own server."""
