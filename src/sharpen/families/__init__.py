"""What model families there are, what each needs, and which part of Sharpen has it."""
