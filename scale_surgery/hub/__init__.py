"""Upload of a folder to a repository on the Hugging Face Hub: checks, model card, push."""
