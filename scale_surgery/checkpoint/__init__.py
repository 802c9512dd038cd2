"""Checkpoints as bytes on disk: headers, shards, hashes, and how a folder appears whole or not at all. No torch."""
