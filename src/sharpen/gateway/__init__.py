"""OpenAI-style requests in, responses out; every call recorded at the token boundary, on the right rollout."""
