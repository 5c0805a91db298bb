"""The vLLM engine, which has its own processes and weight-transfer protocol."""
