"""A full and a failing disk: every call on a file, in every command, fails once."""
