"""Facts about Hugging Face models: where layers, heads and embeddings are, how they are initialised and saved."""
