"""Samples continuations of token ids: the engine interface, our continuous-batching engine, and vLLM."""
