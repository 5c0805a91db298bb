"""Records what applications say to a model that another server serves.

- `server`: forwards and records until it is told to end
- `proxy`: a request there, an answer back, a call in the record
- `asked`: what a request asks beside, to have the tokens
- `answer`: the answer, gathered and given back without that
- `upstream`: the server that answers
- `sessions`: which calls belong together, written as they come
- `folder`: what a recording says of itself
- `rows`: rows for supervised training, of a recording or a run
- `model_export`: a run's model as GGUF, or on the hub
"""
