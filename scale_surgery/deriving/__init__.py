"""Facts about any decoder, derived from the model itself."""
