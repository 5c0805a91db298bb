"""Models for applications outside of any run: served, learning from feedback, or recorded by a proxy.

In: requests of applications, marks of their users. Out: answers, and groups that a trainer takes. It must not know of
tasks, workflows or judges.

- `server`: `sharpen serve MODEL`: a model until it is told to end
- `model`: the model that is served: a run's checkpoint, or any model's files
- `adapters`: adapters beside it, each by a name
- `front`: the requests of applications
- `openapi`: what is answered, as an OpenAPI document
- `metrics`: what was answered, for Prometheus
- `learning`: `sharpen serve --config`: a model that learns from its use
- `sessions`: who calls, which calls belong together, what they are worth
- `visit`: one session, to be trained and to be saved
- `feedback`: what applications say of their sessions
- `trainer`: the trainer behind it, a process
- `record/`: `sharpen record`: calls to somebody else's server, and what is made of them
- `interchange/`: trajectories as other programs write and read them
"""
