"""Samples continuations of token ids: our continuous-batching engine (`embedded`), vLLM, replicas of either.

In: requests of token ids (`sharpen.contracts`), new weights. Out: sampled ids, their logprobs and policy versions. It
must not know of chat, tools or text (except stop strings), of rollouts or of training.
"""
