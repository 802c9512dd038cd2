"""Tests of what is derived from stock models."""
