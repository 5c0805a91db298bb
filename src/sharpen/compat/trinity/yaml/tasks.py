"""The tasks of a Trinity-RFT file, the workflow that does them, and the auxiliary models.

In: a draft with every key that the file gives. Out: the draft, with datasets, workflow and models answered for.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.registry import WORKFLOWS
from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.functions import DISTILL
from sharpen.compat.trinity.yaml.rules import function_place
from sharpen.compat.trinity.yaml.run import sampling
from sharpen.compat.trinity.yaml.selection import usual_order
from sharpen.config.explain import Place
from sharpen.config.run import HELD_OUT

_INPUT, _MODELS = "buffer.explorer_input", "explorer.auxiliary_models"
_DATASET = {"path": "path", "split": "split", "subset_name": "name"}
_FORMAT = {
    "prompt_key": "prompt",
    "response_key": "response",
    **dict.fromkeys(("system_prompt", "reply_prefix", "image_key", "video_key")),
}
"""Parts of a taskset's format that workflows read, with Trinity-RFT's defaults."""
_ARGUMENTS = {"workflow_args": "workflow_args", "reward_fn_args": "task_args.reward_fn_args"}
"""What is passed on, and where we keep it."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
"""The sampling that a taskset may have of its own."""
_AUXILIARY = {
    "model_path": "model_path",
    "max_model_len": "max_model_len",
    "max_response_tokens": "max_tokens",
    **{
        name: name
        for name in ("temperature", "top_p", "top_k", "enable_thinking", "tool_call_parser", "reasoning_parser")
    },
}
"""Keys of an auxiliary model, and our settings."""
_OF_AGENTSCOPE_0 = ("agentscopev0_react_math_workflow", "agentscope_reactv2_math_workflow")
_REGISTERED_ONCE = {
    "bots_math_boxed_workflow": "examples.bots.workflow.bots_math_boxed_workflow.BOTSMathBoxedWorkflow",
    "bots_ref_eval_collect_math_boxed_workflow": (
        "examples.bots.workflow.bots_math_boxed_workflow.BOTSRefEvalCollectMathBoxedWorkflow"
    ),
    "learn2ask_workflow": "examples.learn_to_ask.workflow.workflow_learn2ask.Learn2AskWorkflow",
}
"""Names that modules of Trinity-RFT's examples registered in earlier versions, and where the classes are. A file of
today still has such a name."""
_ENGINES = {"engine_num": "inference_engine_num", "tensor_parallel_size": "tensor_parallel_size"}
_OF_ITS_OWN = ("model_path", "tool_call_parser", "reasoning_parser")
"""Those that are never taken from the model to train."""


def tasksets(draft: Draft) -> None:
    """Training and evaluation tasks, each evaluation set with a workflow, a reward function and a format of its own."""
    training = _items(draft, f"{_INPUT}.tasksets")
    if any(key.startswith(f"{_INPUT}.taskset.") for key in draft.given):
        if training:
            draft.wrong(f"{_INPUT}.tasksets", "is given beside taskset: keep one of them")
        training = [f"{_INPUT}.taskset"]
    elif len(training) > 1:
        draft.wrong(f"{_INPUT}.tasksets", f"has {len(training)} sets, but a run trains on one: join the files")
    evaluation = _items(draft, f"{_INPUT}.eval_tasksets")
    if draft.evaluate_only and not evaluation:
        draft.wrong(f"{_INPUT}.eval_tasksets", "is empty, so that mode bench has nothing to evaluate")
    main = next(iter((*training, *evaluation)), f"{_INPUT}.taskset")
    sampling(draft, main)
    _main(draft, main, is_evaluation=bool(evaluation) and not training)
    if draft.evaluate_only or training:
        _dataset(draft, main, ("train_dataset",))
    if not draft.evaluate_only:
        usual_order(draft, main)
    if not evaluation:
        draft.idle("there are no eval_tasksets", f"{_INPUT}.default_eval_workflow_type")
    names: set[str] = set()
    for index, prefix in enumerate(evaluation):
        name = _evaluation(draft, prefix, index, names)
        if prefix != main:
            _own(draft, prefix, main, name)


def _items(draft: Draft, key: str) -> list[str]:
    """The prefixes of a list's items."""
    return [f"{key}[{index}]" for index in range(draft.lengths.get(key, 0))]


def _main(draft: Draft, prefix: str, *, is_evaluation: bool) -> None:
    """The workflow and what it reads, from the tasks that the run is about."""
    key, workflow = _type(draft, prefix, "workflow", is_evaluation)
    if workflow is not None:
        draft.set("workflow", _workflow(draft, key, workflow), key)
    key, reward = _type(draft, prefix, "reward_fn", is_evaluation)
    if reward is not None:
        draft.set("task_args.reward_fn", function_place(reward), key)
    for name in _FORMAT:
        former, own = f"{_INPUT}.{name}", f"{prefix}.format.{name}"  # where earlier versions had them
        draft.move(former, f"task_args.{name}")
        if own in draft.given:
            draft.idle(f"{own} comes first", former)
            draft.move(own, f"task_args.{name}")
    for name, place in _ARGUMENTS.items():
        draft.move(f"{prefix}.{name}", place)


def _workflow(draft: Draft, key: str, name: str) -> str:
    """The workflow that a name means, in our form."""
    if name in _OF_AGENTSCOPE_0:
        draft.say("runs the agent of AgentScope 1.x, with the same tool and as many rounds", key)
    if name in _REGISTERED_ONCE and name not in WORKFLOWS:  # a plugin may register it still
        draft.say(f"is {_REGISTERED_ONCE[name]}: the example's module does not register that name any more", key)
        return function_place(_REGISTERED_ONCE[name])
    return function_place(name)


def _dataset(draft: Draft, prefix: str, place: Place) -> None:
    for name, field in _DATASET.items():
        draft.move(f"{prefix}.{name}", (*place, field))


def _type(draft: Draft, prefix: str, kind: str, is_evaluation: bool) -> tuple[str, str | None]:
    """The key that names the workflow or the reward function of a taskset, and the name."""
    keys = [f"{prefix}.default_{kind}_type"]
    if is_evaluation and kind == "workflow":
        keys += [f"{prefix}.default_eval_workflow_type", f"{_INPUT}.default_eval_workflow_type"]
    found = {key: name for key in (*keys, f"{_INPUT}.default_{kind}_type") if (name := draft.get(key)) is not None}
    return next(iter(found.items()), (keys[0], None))


def _evaluation(draft: Draft, prefix: str, index: int, names: set[str]) -> str:
    """The first set is the held-out one, further ones are reported beside, by name. Return the set's name here."""
    key = f"{prefix}.name"
    name = draft.get(key) or f"eval_{index}"
    if name in names:
        draft.refuse(key, "two evaluation sets have this name: give each its own")
    names.add(name)
    if f"{prefix}.path" not in draft.given:
        draft.wrong(f"{prefix}.path", "is missing")
    _dataset(draft, prefix, ("evaluation", "further", name) if index else ("eval_dataset",))
    if index == 0:
        draft.idle("the first evaluation set is the held-out one, without a name", key)
    return name if index else HELD_OUT


def _own(draft: Draft, prefix: str, main: str, name: str) -> None:
    """What an evaluation set has in place of what the tasks have that the run is about. Trinity-RFT's defaults are a
    set's own too: it takes nothing from the training tasks."""
    place = ("evaluation", "own", name)
    of_main = _type(draft, main, "workflow", "eval_tasksets" in main)[1]
    key, workflow = _type(draft, prefix, "workflow", is_evaluation=True)
    if workflow is not None and of_main is not None and workflow != of_main:
        draft.set((*place, "workflow"), _workflow(draft, key, workflow), key)
    key = f"{prefix}.workflow_args"
    arguments = draft.get(key) or {}
    if arguments != (draft.given.get(f"{main}.workflow_args") or {}):
        draft.set((*place, "workflow_args"), arguments, key)
        if not arguments:
            draft.say(f"{key} is not given: these tasks have none, as there ({main.rpartition('.')[2]} has its own)")
    own, of_run = _task_args(draft, prefix), _task_args(draft, main)
    of_training = dict(draft.tree.get("task_args", {}).get("rollout_args") or {})
    keys = {name: f"{prefix}.rollout_args.{name}" for name in _SAMPLING}
    sampled = of_training | {name: draft.get(key) for name, key in keys.items() if key in draft.given}
    if own != of_run or sampled != of_training:
        rollout_args = {"rollout_args": sampled} if sampled else {}
        draft.set((*place, "task_args"), {name: value for name, value in own.items() if value} | rollout_args, prefix)


def _task_args(draft: Draft, prefix: str) -> dict[str, Any]:
    """How the rows of a taskset are read and scored, defaults included."""
    found: dict[str, Any] = {}
    for name, default in _FORMAT.items():
        own, former = f"{prefix}.format.{name}", f"{_INPUT}.{name}"
        draft.get(own)
        found[name] = draft.given.get(own, draft.given.get(former, default))
    reward = _type(draft, prefix, "reward_fn", is_evaluation=True)[1]
    return {
        **found,
        "reward_fn": None if reward is None else function_place(reward),
        "reward_fn_args": draft.get(f"{prefix}.reward_fn_args") or {},
    }


def auxiliary_models(draft: Draft) -> None:
    """Each auxiliary model under its name, in the file's order; the first may be the teacher."""
    names: set[str] = set()
    has_teacher = draft.trains_by(DISTILL)
    if has_teacher:
        _teacher(draft)
    for index, prefix in enumerate(_items(draft, _MODELS)):
        if has_teacher and index == 0:
            continue
        key = f"{prefix}.name"
        name = draft.get(key) or f"auxiliary_{index + 1}"
        if name in names:
            draft.refuse(key, "two auxiliary models have this name: give each its own")
        names.add(name)
        _auxiliary(draft, prefix, ("auxiliary_models", name))


def _teacher(draft: Draft) -> None:
    """The first auxiliary model, which the trainer loads."""
    prefix = f"{_MODELS}[0]"
    external = draft.given.get(f"{prefix}.engine_type") == "external"
    if not draft.lengths.get(_MODELS):
        draft.wrong(_MODELS, "is missing: its first model is the teacher")
    elif external or draft.given.get(f"{prefix}.external_model_config.enable"):
        draft.wrong(prefix, "is behind an endpoint, but the trainer needs the teacher's weights: name its folder")
    elif f"{prefix}.model_path" not in draft.given:
        draft.wrong(f"{prefix}.model_path", "is missing")
    draft.move(f"{prefix}.model_path", "distill.teacher_path")
    for key in [key for key in draft.unanswered() if key.startswith(f"{prefix}.")]:
        draft.idle("a teacher samples nothing, it is compared with", key)


def _auxiliary(draft: Draft, prefix: str, place: Place) -> None:
    """One auxiliary model; what it leaves out is the model's own, except for whether and how it is parsed."""
    for key, field in _AUXILIARY.items():
        keys = (f"{prefix}.{key}",) if key in _OF_ITS_OWN else (f"{prefix}.{key}", f"model.{key}")
        chosen = next((candidate for candidate in keys if candidate in draft.given), None)
        if chosen is not None:
            draft.move(chosen, (*place, field))
        elif key == "max_model_len" and (length := draft.tree.get("model", {}).get(key)) is not None:
            draft.set((*place, field), length, f"model.{key}")
        elif key.endswith("parser"):
            draft.set_default((*place, field), None, f"{prefix}.{key}")
    for key, field in _ENGINES.items():
        if draft.tree.get("execution") == "ray":
            draft.move(f"{prefix}.{key}", (*place, field))
        else:
            draft.idle("an auxiliary model has one engine here; with cluster.ray_address they count", f"{prefix}.{key}")
    engine, section = draft.get(f"{prefix}.engine_type"), f"{prefix}.external_model_config"
    if engine not in (None, "vllm", "vllm_async", "sglang", "external"):
        draft.refuse(f"{prefix}.engine_type", "use vllm (served here, by our own engine) or external (an endpoint)")
    if draft.get(f"{section}.enable") or engine == "external":
        _endpoint(draft, section, place)
        return
    names = (f"{section}.{name}" for name in ("base_url_env", "api_key_env", "model_name"))
    draft.idle("it belongs to a model behind an endpoint", *names)
    if f"{prefix}.model_path" not in draft.given:
        draft.wrong(f"{prefix}.model_path", "is missing")


def _endpoint(draft: Draft, section: str, place: Place) -> None:
    """A model behind an endpoint: the environment holds its URL and its key."""
    url, key = f"{section}.base_url_env", f"{section}.api_key_env"
    variable = draft.get(url) or "OPENAI_BASE_URL"
    if variable in draft.environment:
        draft.set((*place, "base_url"), draft.environment[variable], url)
    else:
        text = f"names the environment variable {variable}, which is not set: it holds the endpoint's URL"
        draft.wrong(url, text)
    draft.set((*place, "api_key_env"), draft.get(key) or "OPENAI_API_KEY", key)
    draft.move(f"{section}.model_name", (*place, "model_path"))
