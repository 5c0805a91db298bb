"""Built-in judges that reward low cost instead of right answers. Less is better, so rewards are negative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpen.config.public import JudgeOutput


async def avg_time_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Return minus the workflow's duration in seconds as reward, and the duration as the metric `avg_time_seconds`."""
    metrics = _metrics(response)
    if "execution_time" not in metrics:
        raise ValueError("avg_time_judge needs 'execution_time' in response['metrics']")
    seconds = float(metrics["execution_time"])
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Return minus the tokens that the workflow used (prompts and answers) as reward, and the tokens as the metric
    `token_consumed`. If `usage` has no `total_tokens`, its `output_tokens` count."""
    usage = _metrics(response).get("usage")
    if not isinstance(usage, Mapping):
        raise ValueError(
            "avg_token_consumption_judge needs to know how many tokens were used, and the model does not say: it is "
            "known for models of AgentScope and for models served here; else write a judge that reads it elsewhere"
        )
    tokens = usage.get("total_tokens")
    if tokens is None:
        tokens = usage.get("output_tokens")
    if tokens is None:
        raise ValueError(f"usage has neither total_tokens nor output_tokens, but {', '.join(usage) or 'nothing'}")
    return JudgeOutput(reward=-float(tokens), metrics={"token_consumed": float(tokens)})


def _metrics(response: Any) -> Mapping[str, Any]:
    metrics = response.get("metrics") if isinstance(response, Mapping) else None
    if not isinstance(metrics, Mapping):
        raise ValueError(f"response must be a dict with 'response' and 'metrics', but is {type(response).__name__}")
    return metrics
