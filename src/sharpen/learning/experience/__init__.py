"""Turns scored groups into batches of merged sequences with loss mask, logprobs, advantages and weights."""
