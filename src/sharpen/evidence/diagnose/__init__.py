"""Why is the reward flat? Finds causes in the records of a run, with evidence and advice for each.

- `diagnosis`: all rules in order, over a run or while it works
- `finding`: one cause: what, how one sees it, what to do
- `data`: the numbers and rollouts that rules look at
- `rewards`: causes in the rewards
- `hacking`: signs that the model learns the judge instead of the task
- `rollouts`: causes in the rollouts
- `policy`: causes in the updates
- `rows`: causes in a run without rollouts
- `series`: first and last steps, noise, trends
"""
