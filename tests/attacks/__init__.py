"""What is known to be done to users by the files of a model: what makes the file, and what must happen."""
