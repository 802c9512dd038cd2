"""Routers: calibration of their numbers, and reports by token."""
