"""A run: put together (`assembly`), trained step by step from a source of batches (`loop`), written up (`outcome`)."""
