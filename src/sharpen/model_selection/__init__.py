"""Choose the model that does best in an agent, among models of others and models that are served here.

In: a workflow, a judge, tasks, candidates. Out: the best one, with the evidence. The names are those of AgentScope's
`tuner.model_selection`.
"""

from sharpen.model_selection.judges import avg_time_judge, avg_token_consumption_judge
from sharpen.model_selection.select import select_model

__all__ = ["avg_time_judge", "avg_token_consumption_judge", "select_model"]
