"""What will be done: architectures and methods as data, and from a request to a plan. No torch, no weight is read."""
