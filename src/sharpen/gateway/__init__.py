"""Answers OpenAI-style requests, and records every call with its exact tokens on the right rollout.

In: requests of four protocols, by socket or by a client in this process. Out: answers, and `Call`s. It must not know
which engine samples, what a rollout is rewarded with, or what is trained.

- `gateway`: the way of every request, from its key to its recorded call
- `session`: what one rollout has at the gateway: its key, its calls and asyncio tasks, why it failed
- `exchange`: the records of one request on its way, and the chunks of its answer
- `requests`: the request that all protocols' requests become, and `ApiError`
- `answers`: the answer that every protocol writes in its own words
- `protocols/`: the vendors' APIs
- `routes`: which path is which API's
- `history`: the ids of a prompt, exactly those of the earlier call that it goes on from
- `render`: the model's chat template and tokenizer: messages to ids, ids to text
- `sampler`: samples the choices of a request, reads and records them; for streams, while they are sampled
- `formats/`: how models write tool calls and reasoning
- `constraints`: the grammar of the answer that a request asks for
- `images`: the images of a request, decoded within bounds
- `memory`: what earlier answers said, where clients send them back in other words
- `model`: the model object of a workflow, with clients of OpenAI and Anthropic, and the environment of a command
- `transport`: answers clients of this process without a socket
- `server`: answers everybody else over HTTP
- `listening`: where it listens, its URLs, and one connection with its bounds
- `caller`: whose a request is: keys of rollouts, and code of one rollout that uses another's client
- `body`: decodes JSON within bounds
- `door`: checks a body against the schema of its API
- `replies`: whole replies and errors, as the API has them
- `meter`: counts calls and tokens of auxiliary models, up to a cap
"""
