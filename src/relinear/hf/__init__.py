"""Hugging Face models: find their layers, heads and embeddings; initialise, record and save what is added to them."""
