"""Looking into a model in the browser: its units on real and typed text, and what happens when they are changed."""
