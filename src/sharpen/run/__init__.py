"""A run: `assembly` builds it, `loop` trains it step by step from a source of batches, `outcome` writes the results."""
