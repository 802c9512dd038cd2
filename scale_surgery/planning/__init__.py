"""Architectures and methods as data, and the plan of a request. No torch; no weight is read."""
