"""Facts about an architecture, derived from the model itself: two tiny twins of it are built, run and watched."""
