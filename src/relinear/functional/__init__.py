"""The maths of every operator as plain functions of tensors: short, readable, and what faster forms are held to."""
