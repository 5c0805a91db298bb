"""Samples continuations of token ids: our continuous-batching engine (`embedded`), vLLM, replicas of either.

In: requests of token ids (`sharpen.contracts`), new weights. Out: sampled ids, their logprobs and policy versions. It
must not know of chat, tools or text (except stop strings), of rollouts or of training.

- `requests`: checks requests for every engine
- `token_masks`: which tokens a constraint allows, place by place
- `supports`: which tokens `top_p`, `top_k` and `min_p` left, place by place
- `routing`: several engines as one, where a rollout returns to the one that knows its prefix
- `embedded/`: our engine, in this process
- `vllm/`: vLLM, in processes of its own
- `families`: which models the embedded engine serves, and how
- `weights`: copies new weights into its model
"""
