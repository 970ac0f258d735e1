"""What relinear knows about Hugging Face models: their layers, heads and embeddings, initialisation and configs."""
