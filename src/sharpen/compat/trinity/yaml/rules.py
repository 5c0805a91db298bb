"""Rules for single keys of a Trinity-RFT file that need more than a move.

In: a draft, a key and its value. Out: the draft, which knows what became of the key.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import OFF, Draft, Rule, is_one_of, shown


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
    _or_for_ever(draft, key, "algorithm.save_interval_steps", "only the last step is saved")


def keep_checkpoints(draft: Draft, key: str, value: object) -> None:
    """0 keeps them all."""
    _or_for_ever(draft, key, "trainer.keep_checkpoints", "every checkpoint is kept")


def _or_for_ever(draft: Draft, key: str, name: str, said: str) -> None:
    number = draft.whole(key)
    if number is None:
        return
    draft.set(name, number if number > 0 else 10**9, key)
    if number < 1:
        draft.say(said, key)


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


_OF_LORA = ("name", "path", "base_model_name", "lora_rank", "lora_alpha", "lora_dtype", "target_modules")


def lora(draft: Draft, key: str, value: object) -> None:
    """Adapters that are trained in place of all weights; Trinity-RFT has rank and alpha 32 unless set."""
    if is_one_of(value, OFF):
        draft.same(key)
        return
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        draft.wrong(key, f"must be a list of one section of settings (one adapter is trained), but {shown(value)} came")
        return
    draft.same(key)
    given = {str(name): inner for name, inner in value[0].items() if inner is not None}
    for name in given.keys() - {*_OF_LORA, "exclude_modules", "is_dummy"}:
        draft.wrong(f"{key}[0].{name}", f"is not a key of Trinity-RFT; there are {', '.join(_OF_LORA)}")
    for name, place in (("lora_rank", "rank"), ("lora_alpha", "alpha")):
        own = f"{key}[0].{name}"
        if name in given:
            draft.set(f"trainer.lora.{place}", given[name], own)
        else:
            draft.set_default(f"trainer.lora.{place}", 32, own)
    modules = given.get("target_modules", "all-linear")
    if isinstance(modules, list) or (isinstance(modules, str) and modules.isidentifier()):
        draft.set("trainer.lora.target_modules", [modules] if isinstance(modules, str) else modules, f"{key}[0]")
    elif modules != "all-linear":
        draft.wrong(f"{key}[0].target_modules", f"is {shown(modules)}: use all-linear or names of layers, as a list")
    for name, usual, text in (
        ("path", "", "a run begins with new adapters: leave it out"),
        (
            "base_model_name",
            draft.given.get("model.model_path"),
            "adapters are those of model.model_path: leave it out",
        ),
        ("lora_dtype", "auto", "adapters are float32: leave it out"),
        ("exclude_modules", "", "name those that get an adapter (target_modules)"),
    ):
        if given.get(name, usual) not in (usual, "float32" if name == "lora_dtype" else usual):
            draft.wrong(f"{key}[0].{name}", f"is {shown(given[name])}: {text}")
