"""Results to look at: tables for the terminal, figures, and pages for the browser."""
