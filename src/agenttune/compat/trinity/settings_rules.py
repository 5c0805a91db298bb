"""Rules for single keys of a Trinity-RFT file that need more than a move.

In: a draft, a key and its value. Out: the draft, which knows what became of the key.
"""

from __future__ import annotations

from agenttune.compat.trinity.settings_draft import OFF, Draft, Rule, is_one_of, shown


def monitor_type(draft: Draft, key: str, value: object) -> None:
    """Where metrics go."""
    if value == "swanlab":
        draft.refuse(key, "there is no SwanLab sink: use tensorboard, wandb or mlflow")
    else:
        draft.set("monitor_type", value, key)


def operators(draft: Draft, key: str, value: object) -> None:
    """Data processing: refused, with the names of the operators."""
    if is_one_of(value, OFF):
        draft.same(key)
        return
    names = [str(item.get("name", item)) if isinstance(item, dict) else str(item) for item in _items(value)]
    where = "the workflow or the judge" if "experience" in key else "a dataset that you write beforehand"
    draft.wrong(
        key, f"has the operators {', '.join(names)}, but data processing does not exist here yet: do it in {where}"
    )


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def save_interval(draft: Draft, key: str, value: object) -> None:
    """0 saves the last step only."""
    number = draft.whole(key)
    if number is not None and number < 1:
        draft.set("algorithm.save_interval_steps", 10**9, key)
        draft.say("only the last step is saved", key)
    elif number is not None:
        draft.set("algorithm.save_interval_steps", number, key)


def keep_checkpoints(draft: Draft, key: str, value: object) -> None:
    """0 keeps them all."""
    number = draft.whole(key)
    if number is not None and number < 1:
        draft.set("trainer.keep_checkpoints", 10**9, key)
        draft.say("every checkpoint is kept", key)
    elif number is not None:
        draft.set("trainer.keep_checkpoints", number, key)


def retries(draft: Draft, key: str, value: object) -> None:
    """Retries after the first attempt."""
    number = draft.whole(key)
    if number is not None:
        draft.set("rollout.max_attempts", number + 1, key)


def eval_on_startup(draft: Draft, key: str, value: object) -> None:
    """Ours evaluates before and after, or neither."""
    start = draft.flag(key)
    if start is not None:
        draft.set("evaluation.before_and_after", start, key)
    if start is False:
        draft.say("nothing is evaluated before training, nor after it (evaluation.before_and_after)", key)


def over_rollout(draft: Draft, key: str, value: object) -> None:
    """Ways to leave slow tasks behind."""
    if is_one_of(value, OFF):
        draft.same(key)
    else:
        draft.say("every step waits for all of its rollouts", key)


def task_order(draft: Draft, key: str, value: object) -> None:
    """In which order tasks come."""
    if value in ("shuffle", "random"):
        draft.same(key)
    elif value == "sequential":
        draft.say("tasks come in a random order, the same for the same seed", key)
    else:
        draft.refuse(key, "tasks are not chosen by difficulty here yet: use shuffle")


def storage_type(draft: Draft, key: str, value: object) -> None:
    """Tasks come from files."""
    if str(value).lower() == "file":
        draft.same(key)
    else:
        draft.refuse(key, "tasks are read from files or the Hugging Face hub: export them to JSONL and use file")


def optimizer_type(draft: Draft, key: str, value: object) -> None:
    """Adam in its decoupled form."""
    draft.same(key) if str(value).lower() in ("adam", "adamw") else draft.refuse(key, "the optimizer is AdamW")


def betas(draft: Draft, key: str, value: object) -> None:
    """AdamW's two decays."""
    if not isinstance(value, list) or len(value) != 2:
        draft.wrong(key, f"must be two numbers, but {shown(value)} came")
        return
    draft.set("trainer.beta1", value[0], key)
    draft.set("trainer.beta2", value[1], key)


def dtype(draft: Draft, key: str, value: object) -> None:
    """The compute type, of the engine and of the trainer, which must agree."""
    names = {"auto": "auto", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "float": "float32"}
    if str(value) not in names:
        draft.refuse(key, "use auto, bfloat16 or float32")
        return
    draft.set("engine.dtype", names[str(value)], key)
    draft.set("trainer.dtype", names[str(value)], key)


def auto_tool_choice(draft: Draft, key: str, value: object) -> None:
    """Without it tool calls stay text, whatever the parser."""
    choice = draft.flag(key)
    if choice is False and draft.given.get("explorer.rollout_model.tool_call_parser") is not None:
        draft.set("model.tool_call_parser", None, key)
        draft.say("tool calls stay text: the tool_call_parser is not used", key)
    else:
        draft.same(key)


def tool_parser(draft: Draft, key: str, value: object) -> None:
    """How tool calls are read."""
    if draft.given.get("explorer.rollout_model.enable_auto_tool_choice") is False:
        draft.same(key)
    else:
        draft.set("model.tool_call_parser", value, key)


def mapping_to(place: str) -> Rule:
    """Settings of a plain mapping, copied."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if isinstance(value, dict):
            draft.set(place, value, key)
        else:
            draft.wrong(key, f"must be a section of settings, but {shown(value)} came")

    return rule


def old_logprobs(draft: Draft, key: str, value: object) -> None:
    """Whether the trainer computes again what the engine recorded."""
    if draft.flag(key) is False:
        draft.say("the old logprobs are those recorded while sampling", key)
    else:
        draft.same(key)


def priority(draft: Draft, key: str, value: object) -> None:
    """A choice among the experiences of several steps."""
    if is_one_of(value, OFF):
        draft.same(key)
    else:
        draft.say("each step trains on its own rollouts, each of them once", key)


def environment_variables(draft: Draft, key: str, value: object) -> None:
    """Variables of the workflows, which run in this process: they must be set already."""
    if is_one_of(value, OFF):
        draft.same(key)
        return
    if not isinstance(value, dict):
        draft.wrong(key, f"must be a section of settings, but {shown(value)} came")
        return
    draft.same(key)
    missing = {name: inner for name, inner in value.items() if draft.environment.get(str(name)) != str(inner)}
    if missing:
        wanted = " ".join(f"{name}={inner}" for name, inner in missing.items())
        draft.wrong(key, f"are set by the shell that starts the run, before it does: export {wanted}")


_NO_CRITIC = "the algorithm trains no critic"


def critic_model_path(draft: Draft, key: str, value: object) -> None:
    """The critic starts from the policy's model."""
    if draft.given.get("algorithm.algorithm_type") != "ppo":
        draft.idle(key, _NO_CRITIC)
    elif value == draft.given.get("model.model_path") or is_one_of(value, OFF):
        draft.same(key)
    else:
        draft.refuse(key, "the critic starts from model.model_path here: leave it out")


def critic_warmup(draft: Draft, key: str, value: object) -> None:
    """Steps in which the critic alone is trained."""
    if draft.given.get("algorithm.algorithm_type") != "ppo":
        draft.idle(key, _NO_CRITIC)
    elif is_one_of(value, OFF):
        draft.same(key)
    else:
        draft.refuse(key, "policy and critic are trained together from the first step: leave it out")
