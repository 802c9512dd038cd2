"""One base and many expansions of it in one folder, each under its name."""
