"""What writes a model folder: expand, strip, route, merge, extract, apply, and the record that each of them keeps."""
