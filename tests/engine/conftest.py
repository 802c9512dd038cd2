"""Routed models, for tests of the new engine."""

from tests.routed import trio_of

__all__ = ["trio_of"]
