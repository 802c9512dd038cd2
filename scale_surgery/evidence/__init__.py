"""What reads a model folder and judges it: verify, evaluate, report."""
