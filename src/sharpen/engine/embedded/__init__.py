"""The embedded engine: continuous batching over plain torch and the Hugging Face model classes."""
