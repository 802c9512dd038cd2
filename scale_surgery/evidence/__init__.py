"""Evidence about a model folder: verify, evaluate, report."""
