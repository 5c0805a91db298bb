"""Places the parts: one process with a serving thread (`local`)."""
