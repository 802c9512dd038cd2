"""Verbs that make one model folder of another: expand, adopt, apply, compose, extract, strip, route, merge."""
