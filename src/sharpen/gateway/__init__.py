"""Answers OpenAI-style requests, and records every call with its exact tokens on the right rollout.

In: requests of four protocols, by socket or by a client in this process. Out: answers, and `Call`s. It must not know
which engine samples, what a rollout is rewarded with, or what is trained.
"""
