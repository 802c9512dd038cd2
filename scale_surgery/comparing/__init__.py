"""Compare methods on a user's own model and text: full fine-tuning, adapters of PEFT, expansions."""
