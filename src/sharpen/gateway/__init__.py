"""Answers OpenAI-style requests, and records every call with its exact tokens on the right rollout."""
