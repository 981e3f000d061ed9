"""Read model files: configurations, weights and tokenizers, from Hugging Face folders and GGUF."""
