"""Convert models of diffllm to and from the formats of Hugging Face transformers."""
