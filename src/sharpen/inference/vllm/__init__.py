"""vLLM as the engine, with its own processes and its own protocol of weight updates."""
