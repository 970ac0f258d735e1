"""A seeded fuzz of every file and argument that the commands read."""
