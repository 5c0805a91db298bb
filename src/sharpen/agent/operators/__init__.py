"""Operators: functions that look at tasks before a run, or at a step's rollouts before they train.

An operator on rollouts takes the groups of a step and returns them, with other rewards or with rollouts dropped:

    from sharpen import drop, with_reward

    def short_answers_only(groups, most=50):
        return [
            replace(group, rollouts=tuple(r if words(r) <= most else drop(r, "too long") for r in group.rollouts))
            for group in groups
        ]

An operator on tasks takes the tasks and returns those to train on. Both are named in the settings
(`sampling.operators`, `sampling.task_operators`), the built-in ones by name, one's own as `package.module:function`.

- `pipeline`: the operators that the settings name, one after the other, with the built-in ones on tasks
- `rollouts`: the built-in ones on rollouts; `drop` and `with_reward`
- `data_juicer/`: those of Data-Juicer
"""

from sharpen.agent.operators.rollouts import drop, with_reward

__all__ = ["drop", "with_reward"]
