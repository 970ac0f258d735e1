"""What is known of Hugging Face models: where layers, heads and embeddings are, how they are initialised and saved."""
