"""What model families there are, what each needs, and which part of Sharpen has it.

In: a model's folder. Out: its modules, tokenizer, images, adapters, experts, and what is refused by name. It must not
know of requests, rollouts or training.
"""
