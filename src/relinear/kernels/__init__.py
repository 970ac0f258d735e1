"""Fast twins of ``relinear.functional``, under the same names and signatures; ``choice`` says which form runs."""
