"""What relinear knows about Hugging Face models: their layers, heads, embeddings, initialisation, configs, losses."""
