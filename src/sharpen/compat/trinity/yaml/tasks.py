"""The tasks of a Trinity-RFT file, the workflow that does them, and the auxiliary models.

In: a draft with every key that the file gives. Out: the draft, with datasets, workflow and models answered for.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft, shown
from sharpen.compat.trinity.yaml.run import sampling
from sharpen.compat.trinity.yaml.teacher import teacher

_INPUT = "buffer.explorer_input"
_FORMAT = {"prompt_key": "prompt", "response_key": "response", "system_prompt": None, "reply_prefix": None}
"""Parts of a taskset's format that workflows read, with Trinity-RFT's defaults."""
_ARGUMENTS = {"workflow_args": "workflow_args", "reward_fn_args": "taskset.reward_fn_args"}
"""What is passed on, and where we keep it."""
_AUXILIARY = {
    "model_path": "model_path",
    "max_model_len": "max_model_len",
    "max_response_tokens": "max_tokens",
    **{name: name for name in ("temperature", "top_p", "enable_thinking", "tool_call_parser", "reasoning_parser")},
}
"""Keys of an auxiliary model, and our settings."""
_OF_ITS_OWN = ("model_path", "tool_call_parser", "reasoning_parser")
"""Those that are never taken from the model to train."""


def tasksets(draft: Draft) -> None:
    """Training and evaluation tasks. One workflow, one reward function and one format do all of them."""
    training = _items(draft, f"{_INPUT}.tasksets")
    if any(key.startswith(f"{_INPUT}.taskset.") for key in draft.given):
        if training:
            draft.wrong(f"{_INPUT}.tasksets", "is given beside taskset: keep one of them")
        training = [f"{_INPUT}.taskset"]
    elif len(training) > 1:
        draft.wrong(f"{_INPUT}.tasksets", f"has {len(training)} sets, but a run trains on one: join the files")
    evaluation = _items(draft, f"{_INPUT}.eval_tasksets")
    main = next(iter((*training, *evaluation)), None)
    if draft.evaluate_only and not evaluation:
        draft.wrong(f"{_INPUT}.eval_tasksets", "is empty, so that mode bench has nothing to evaluate")
    sampling(draft, main or f"{_INPUT}.taskset")
    for name in ("system_prompt", "reply_prefix"):  # where earlier versions had them
        former, own = f"{_INPUT}.{name}", f"{main}.format.{name}"
        if former in draft.given and own in draft.given:
            draft.idle(former, f"{own} comes first")
        elif former in draft.given:
            draft.set(f"taskset.{name}", draft.given[former], former)
    _main(draft, main or f"{_INPUT}.taskset", is_evaluation=bool(evaluation) and not training)
    if not evaluation and f"{_INPUT}.default_eval_workflow_type" in draft.given:
        draft.idle(f"{_INPUT}.default_eval_workflow_type", "there are no eval_tasksets")
    for kind in ("workflow", "eval_workflow", "reward_fn"):
        draft.same(f"{_INPUT}.default_{kind}_type")
    names: set[str] = set()
    for index, prefix in enumerate(evaluation):
        _evaluation(draft, prefix, index, names)
        if main is not None and prefix != main:
            _compare(draft, prefix, main)
        for name in ("temperature", "top_p", "max_tokens"):
            key = f"{prefix}.rollout_args.{name}"
            if key in draft.given and prefix != main:
                draft.idle(key, "evaluation runs each task once greedy and once as in training")


def _items(draft: Draft, key: str) -> list[str]:
    """The prefixes of a list's items."""
    return [f"{key}[{index}]" for index in range(draft.lengths.get(key, 0))]


def _main(draft: Draft, prefix: str, *, is_evaluation: bool) -> None:
    """The workflow and what it reads, from the tasks that the run is about."""
    key, workflow = _type(draft, prefix, "workflow", is_evaluation)
    if workflow is not None:
        draft.set("workflow", _code(workflow), key)
    key, reward = _type(draft, prefix, "reward_fn", is_evaluation)
    if reward is not None:
        draft.set("taskset.reward_fn", _code(reward), key)
    if is_evaluation:  # the rules of training tasks have not moved these
        for name in _FORMAT:
            if f"{prefix}.format.{name}" in draft.given:
                draft.set(f"taskset.{name}", draft.given[f"{prefix}.format.{name}"], f"{prefix}.format.{name}")
        for name, place in _ARGUMENTS.items():
            if f"{prefix}.{name}" in draft.given:
                draft.set(place, draft.given[f"{prefix}.{name}"], f"{prefix}.{name}")
        if draft.evaluate_only:
            _dataset(draft, prefix, ("train_dataset",))


def _dataset(draft: Draft, prefix: str, place: tuple[str, ...]) -> None:
    for name, field in (("path", "path"), ("split", "split"), ("subset_name", "name")):
        if f"{prefix}.{name}" in draft.given:
            draft.set((*place, field), draft.given[f"{prefix}.{name}"], f"{prefix}.{name}")


def _type(draft: Draft, prefix: str, kind: str, is_evaluation: bool) -> tuple[str, str | None]:
    """The key that names the workflow or the reward function of a taskset, and the name."""
    keys = [f"{prefix}.default_{kind}_type"]
    if is_evaluation and kind == "workflow":
        keys += [f"{prefix}.default_eval_workflow_type", f"{_INPUT}.default_eval_workflow_type"]
    keys.append(f"{_INPUT}.default_{kind}_type")
    draft.same(f"{prefix}.default_{kind}_type", f"{prefix}.default_eval_workflow_type")
    key = next((key for key in keys if key in draft.given), keys[0])
    return key, draft.word(key)


def _code(name: str) -> str:
    """`package.module.Class`, as Trinity-RFT writes it, in our form; registered names stay."""
    if ":" in name or "." not in name or "/" in name:
        return name
    module, _, attribute = name.rpartition(".")
    return f"{module}:{attribute}"


def _evaluation(draft: Draft, prefix: str, index: int, names: set[str]) -> None:
    """The first set is the held-out one, further ones are reported beside, by name."""
    given = draft.word(f"{prefix}.name")
    name = given or f"eval_{index}"
    if name in names:
        draft.refuse(f"{prefix}.name", "two evaluation sets have this name: give each its own")
    names.add(name)
    place = ("eval_dataset",) if index == 0 else ("evaluation", "further", name)
    if f"{prefix}.path" not in draft.given:
        draft.wrong(f"{prefix}.path", "is missing")
    _dataset(draft, prefix, place)
    if given is not None and index == 0:
        draft.idle(f"{prefix}.name", "the first evaluation set is the held-out one, without a name")
    draft.same(f"{prefix}.name")


def _compare(draft: Draft, prefix: str, main: str) -> None:
    """What differs from the tasks that the run is about cannot be had: it would be evaluated by other means."""
    whose = main.rpartition(".")[2]
    one = "all tasks of a run have the same: evaluate this set by a file of its own, with mode bench"
    for kind in ("workflow", "reward_fn"):
        of_main = _type(draft, main, kind, "eval_tasksets" in main)[1]
        key, found = _type(draft, prefix, kind, is_evaluation=True)
        if found is not None and of_main is not None and found != of_main:
            draft.refuse(key, f"but {whose} has {of_main!r}; {one}")
    for name, default in _FORMAT.items():
        key = f"{prefix}.format.{name}"
        of_main = draft.given.get(f"{main}.format.{name}", default)
        found = draft.given.get(key, default)
        draft.same(key)
        if found != of_main:
            said = "" if key in draft.given else " (Trinity-RFT's default)"
            draft.wrong(key, f"is {found!r}{said}, but {whose} has {of_main!r}; {one}")
    for name in _ARGUMENTS:
        key = f"{prefix}.{name}"
        of_main, found = draft.given.get(f"{main}.{name}"), draft.given.get(key)
        draft.same(key)
        if found not in (None, {}, of_main):
            draft.refuse(key, f"but {whose} has {shown(of_main or {})}; {one}")
        elif of_main and not found:
            draft.lines.append(f"{draft.file}: {key} is not given: it has the {name} of {whose}")


def auxiliary_models(draft: Draft) -> None:
    """Each auxiliary model under its name, in the file's order."""
    names: set[str] = set()
    has_teacher = teacher(draft)
    for index, prefix in enumerate(_items(draft, "explorer.auxiliary_models")):
        if has_teacher and index == 0:
            continue
        name = draft.word(f"{prefix}.name") or f"auxiliary_{index + 1}"
        if name in names:
            draft.refuse(f"{prefix}.name", "two auxiliary models have this name: give each its own")
        names.add(name)
        draft.same(f"{prefix}.name")
        _auxiliary(draft, prefix, ("auxiliary_models", name))


def _auxiliary(draft: Draft, prefix: str, place: tuple[str, ...]) -> None:
    """One auxiliary model; what it leaves out is the model's own, except for whether and how it is parsed."""
    for key, field in _AUXILIARY.items():
        keys = (f"{prefix}.{key}",) if key in _OF_ITS_OWN else (f"{prefix}.{key}", f"model.{key}")
        chosen = next((candidate for candidate in keys if candidate in draft.given), None)
        if chosen is not None:
            draft.set((*place, field), draft.given[chosen], chosen)
        elif key == "max_model_len" and (length := draft.tree.get("model", {}).get(key)) is not None:
            draft.set((*place, field), length, f"model.{key}")
        elif key.endswith("parser"):
            draft.set_default((*place, field), None, f"{prefix}.{key}")
    engine = draft.word(f"{prefix}.engine_type")
    if engine not in (None, "vllm", "vllm_async", "sglang", "external"):
        draft.refuse(f"{prefix}.engine_type", "use vllm (served here, by our own engine) or external (an endpoint)")
    section = f"{prefix}.external_model_config"
    external = engine == "external" or draft.flag(f"{section}.enable")
    draft.same(f"{prefix}.engine_type", f"{section}.enable")
    if external:
        _endpoint(draft, section, place)
        return
    for name in ("base_url_env", "api_key_env", "model_name"):
        if f"{section}.{name}" in draft.given:
            draft.idle(f"{section}.{name}", "it belongs to a model behind an endpoint")
    if f"{prefix}.model_path" not in draft.given:
        draft.wrong(f"{prefix}.model_path", "is missing")


def _endpoint(draft: Draft, section: str, place: tuple[str, ...]) -> None:
    """A model behind an endpoint: the environment holds its URL and its key."""
    variable = draft.word(f"{section}.base_url_env") or "OPENAI_BASE_URL"
    if variable in draft.environment:
        draft.set((*place, "base_url"), draft.environment[variable], f"{section}.base_url_env")
    else:
        text = f"names the environment variable {variable}, which is not set: it holds the endpoint's URL"
        draft.wrong(f"{section}.base_url_env", text)
    key = f"{section}.api_key_env"
    draft.set((*place, "api_key_env"), draft.word(key) or "OPENAI_API_KEY", key)
    name = f"{section}.model_name"
    if name in draft.given:
        draft.set((*place, "model_path"), draft.given[name], name)
