"""Scored groups in; at batch draw: merged sequences with loss mask, logprobs, advantages and weights out."""
