"""Tests on Gemma 3 270M, a real pretrained base; `make real-model` gets it, `make test-real` runs them.

Its terms of use are Gemma's, so nothing of it is in this repository.
"""
