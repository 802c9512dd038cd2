"""Figures and colours: numbers in, a picture out; no result type is known here."""
