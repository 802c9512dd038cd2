"""Results as HTML pages that need no other file: templates, what fills them, charts and heat tables in them."""
