"""Where the parts of a run live: in this process, in several, in actors of Ray, on two sides of an exchange.

In: a recipe and the parts. Out: the same parts behind the same interfaces, started, watched and closed. It must not
know what is computed in them, nor what a run does next.

- `place`: what a run asks of the place of its parts
- `local`: the serving side in this process
- `serving`: its thread for engine and gateway
- `sessions`: the user's functions, who runs them, and the models that each rollout opens
- `isolated/`: attempts in processes of their own
- `cluster/`: parts in actors of Ray
- `exchange/`: explorer and trainer apart from each other
- `auxiliary/`: models that are not trained
- `engine_choice`: which engine serves a run, and how many of it this machine can hold
- `engines`: loads a model into an engine, and makes its gateway
- `policies`: what the engine serves beside the trained weights: opponents
- `snapshots`: checkpoints hold those of them that follow the trained policy
- `trainers`: makes the trainer, in one process or several
- `ranks/`: a trainer in several processes
- `model_formats`: how a model writes tool calls, from its files
- `teacher_files`: a teacher's files, and whether its tokens are the model's
- `probe`: a few sampled tokens, to compare engine and trainer
- `user_code`: takes the user's functions to another process
"""
