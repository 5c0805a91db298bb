"""The parts of a run in actors of Ray.

- `connect`: joins Ray, and reserves what a run needs
- `placement`: how many actors, with what each
- `serving`: the serving side, in actors
- `worker`: an actor for the user's code
- `attempts`: attempts on such workers, which may die
- `engine`: an actor with an engine, its client, and weights in Ray's object store
- `ranks`: actors that train
"""
