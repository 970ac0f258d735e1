"""The maths of every operator as plain functions of tensors: short, readable, what their twins are held to."""
