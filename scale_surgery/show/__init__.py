"""Views of results: tables for the terminal, figures, and pages for the browser."""
