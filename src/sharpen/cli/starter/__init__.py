"""A folder to start from: an agent, a judge, tasks, settings, a test, and a tiny model made on the spot.

- `folder`: writes the folder
- `tasks`: its tasks: small sums
- `questions`: questions of an environment, to teach its model
- `tiny_model`: makes its model, and teaches it conversations as ids
- `chat_template.jinja`: the chat template of that model
- `files/`: what is copied, by framework
"""
