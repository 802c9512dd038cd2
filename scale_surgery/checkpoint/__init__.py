"""Checkpoints as bytes on disk: headers, shards, hashes, and atomic writing of folders. No torch."""
