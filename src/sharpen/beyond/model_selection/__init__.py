"""Selects the best of several models for an agent.

In: a workflow, a judge, tasks, candidate models. Out: the best one, with figures. The names are those of AgentScope's
`tuner.model_selection`.
"""

from sharpen.beyond.model_selection.select import avg_time_judge, avg_token_consumption_judge, select_model

__all__ = ["avg_time_judge", "avg_token_consumption_judge", "select_model"]
