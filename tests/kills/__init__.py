"""Kills work at seeded moments, starts it again, and holds what it comes to against work that was left in peace."""
