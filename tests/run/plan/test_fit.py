"""What a run chooses by itself: it fits, what somebody gave is kept, and a run goes on as it began."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_toys import CPU, case_of, gpu, model_config, run_config, write_config

from sharpen.config.load import CHOSEN, resolve
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineChoice
from sharpen.run.decide import check_base
from sharpen.run.directory import chosen_before, open_run_directory
from sharpen.run.forecast import too_large
from sharpen.run.plan.case import Case
from sharpen.run.plan.fit import AGAIN, BASE, CACHE, ENGINE_TYPE, LARGE, TOKENS, TRAINER_TYPE, fit
from sharpen.run.plan.hardware import Hardware, bfloat16_speedup
from sharpen.run.plan.memory import ERROR, MARGIN, places
from sharpen.run.plan.predict import advice, find_change

LORA: dict[str, Any] = {"trainer.lora": {"rank": 4}}
BFLOAT16 = {TRAINER_TYPE: "bfloat16", ENGINE_TYPE: "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), model_config())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations are more than the process itself."""
    return write_config(tmp_path_factory.mktemp("wide"), model_config(hidden_size=512, intermediate_size=4096))


def on_cpu(folder: Path, settings: dict[str, Any] | None = None, *, parameters: int | None = None) -> Case:
    """A run on a CPU with 8 GiB; `parameters` is how many the model is said to have."""
    case = case_of(run_config(folder, settings), CPU)
    if parameters is None:
        return case
    return replace(case, models=replace(case.models, policy=replace(case.models.policy, parameters=parameters)))


def with_share(case: Case, share: float) -> Case:
    """The same where this share of the memory that it takes is free."""
    (place,) = places(case)
    return replace(case, hardware=replace(case.hardware, memory_bytes=int(share * place.peak)))


def never(*_: int) -> float:
    raise AssertionError("bfloat16 is measured")


def test_nothing_is_chosen_where_everything_fits(folder: Path) -> None:
    found = fit(on_cpu(folder), speedup=never)
    assert found.chosen == {}
    assert found.line(places(found.case)) == ""


def test_a_large_model_on_a_cpu_begins_with_what_takes_little(folder: Path) -> None:
    found = fit(on_cpu(folder, LORA, parameters=LARGE), speedup=lambda *_: 1.0)
    assert found.chosen == {AGAIN: True, TOKENS: 2048, BASE: "shared"}
    assert found.case.config.trainer.lora is not None
    assert found.case.config.trainer.lora.base == "shared"
    assert found.case.config.trainer.lora.rank == 4
    said = found.line(places(found.case))
    assert said.startswith("memory: micro-batches of 2,048 tokens, activations computed again, one copy of the frozen")
    assert said.endswith("of 8.0 GiB free")
    assert BASE not in fit(on_cpu(folder, parameters=LARGE), speedup=lambda *_: 1.0).chosen  # all weights train
    on_gpu = replace(on_cpu(folder, LORA, parameters=LARGE), hardware=gpu(16))
    assert fit(on_gpu, speedup=never).chosen == {}


def test_what_somebody_gave_is_kept_also_if_it_is_the_default(folder: Path) -> None:
    given = {TOKENS: 8192, AGAIN: False, "trainer.lora": {"base": "own"}, TRAINER_TYPE: "float32"}
    assert fit(on_cpu(folder, given, parameters=LARGE), speedup=never).chosen == {}
    some = on_cpu(folder, {**LORA, AGAIN: False}, parameters=LARGE)
    assert fit(some, speedup=lambda *_: 1.0).chosen == {TOKENS: 2048, BASE: "shared"}


def test_less_memory_less_is_taken(wide: Path) -> None:
    """Each fits with the margin; where only the peak itself is free, less is taken."""
    usual = on_cpu(wide, {"model.max_model_len": 512, "algorithm.batch_size": 16})
    peaks = []
    for share in (1.2, 1.05, 0.7):
        case = with_share(usual, share)
        found = fit(case, speedup=lambda *_: 1.0)
        (place,) = places(found.case)
        assert place.peak * (1 + MARGIN) <= place.capacity
        peaks.append(place.peak)
        tight = replace(case, hardware=replace(case.hardware, memory_bytes=place.peak))
        assert fit(tight, speedup=lambda *_: 1.0).chosen != found.chosen
    assert peaks == sorted(set(peaks), reverse=True)


def test_where_nothing_fits_the_least_is_taken(folder: Path) -> None:
    """8 rollouts; 512 tokens, though none is longer than 256: four sequences of 256 positions of 384 bytes and more."""
    found = fit(with_share(on_cpu(folder, LORA), 0.01), speedup=never)
    assert found.chosen == {AGAIN: True, TOKENS: 512, BASE: "shared", CACHE: 1}
    caches = {one.num_bytes for one in places(found.case)[0].items if one.role == "engine: KV cache"}
    assert caches == {(5 + 1) * 256 * 768}  # a whole MB has room for five, and one of scratch


@pytest.mark.parametrize(("gain", "chosen"), [(1.2, {}), (1.4, BFLOAT16)])
def test_bfloat16_where_it_is_faster(folder: Path, gain: float, chosen: dict[str, str]) -> None:
    asked = []
    found = fit(on_cpu(folder, parameters=20_000_000), speedup=lambda *shape: asked.append(shape) or gain)
    assert found.chosen == chosen
    assert asked == [(160, 64)]  # the first of the largest
    assert found.case.trains_in_bfloat16 == found.case.serves_in_bfloat16 == bool(chosen)
    if chosen:
        assert found.line(places(found.case)).startswith("memory: bfloat16 (1.4 times as fast here as float32): about")


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.dtype": "float32"},
        {"engine.dtype": "float32"},
        {"deterministic": True},
        {"mode": "train", "name": "a"},
    ],
)
def test_a_type_is_chosen_only_if_all_is_open(folder: Path, settings: dict[str, Any]) -> None:
    usual = on_cpu(folder, parameters=20_000_000)
    assert fit(usual.changed(settings), speedup=never).chosen == {}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}, "trainer.dtype and engine.dtype"),
        ({"engine.dtype": "bfloat16"}, "engine.dtype"),
    ],
)
def test_bfloat16_that_is_set_and_slow_here_is_named(folder: Path, settings: dict[str, Any], names: str) -> None:
    """It is kept. Red as a step of ten hours without a word, on a processor without products of bfloat16."""
    case = on_cpu(folder, settings, parameters=20_000_000)
    slow, fast = (fit(case, speedup=lambda *_, gain=gain: gain) for gain in (0.28, 2.0))
    assert slow.chosen == fast.chosen == {}
    assert slow.warning().startswith("  ! bfloat16 is 0.28 times as fast here as float32, and in a backward pass far")
    assert f": leave out {names}, unless" in slow.warning()
    assert fast.warning() == ""
    assert fit(on_cpu(folder, settings), speedup=never).warning() == ""  # a small model


def test_rows_need_the_trainers_type_alone(folder: Path) -> None:
    case = on_cpu(folder, {"algorithm.algorithm_type": "sft"}, parameters=20_000_000)
    assert fit(case, speedup=lambda *_: 2.0).chosen == {TRAINER_TYPE: "bfloat16"}


def test_a_run_goes_on_as_it_began(folder: Path) -> None:
    case = on_cpu(folder, LORA, parameters=LARGE)
    before = {**BFLOAT16, BASE: "shared", AGAIN: True, TOKENS: 1024}
    assert fit(case, before, speedup=never).chosen == before
    short = fit(with_share(case, 0.01), before, speedup=never).chosen
    assert short == {**before, TOKENS: 512, CACHE: 1}  # what may change does
    older = fit(case, {}, speedup=never).chosen  # begun before there was a choice
    assert older.keys() <= {AGAIN, TOKENS}
    given = on_cpu(folder, {**LORA, TRAINER_TYPE: "float32"}, parameters=LARGE)
    assert TRAINER_TYPE not in fit(given, before, speedup=never).chosen  # then refused: it is another run's


def test_the_record_says_what_was_chosen_and_the_next_start_takes_it(tmp_path: Path) -> None:
    given = {
        "checkpoint_root_dir": str(tmp_path),
        "name": "one",
        "train_dataset": {"path": "tasks.jsonl"},
        "model": {"model_path": "toy", "max_model_len": 64},
        **LORA,
    }
    resolved, chosen = resolve(None, given), {**BFLOAT16, BASE: "shared", TOKENS: 1024}
    assert chosen_before(resolved.config) is None
    with open_run_directory(resolved.choose(chosen), None, {}) as directory:
        entries = json.loads((directory.path / "resolved.json").read_text())
        assert {name: entry["value"] for name, entry in entries.items() if entry["origin"] == CHOSEN} == chosen
        assert "bfloat16" not in (directory.path / "config.yaml").read_text()  # what somebody gave, and no more
    assert chosen_before(resolved.config) is None  # it has no checkpoint
    (directory.path / "global_step_1").mkdir()
    assert chosen_before(resolved.config) == chosen


def test_changed_settings_are_not_given_ones(folder: Path) -> None:
    before = run_config(folder, {TOKENS: 100, **LORA})
    after = before.changed({BASE: "nf4", TOKENS: 7, "seed": 3})
    assert (after.trainer.lora, after.seed, after.trainer.max_tokens_per_micro_batch) == (
        before.trainer.lora and before.trainer.lora.model_copy(update={"base": "nf4"}),
        3,
        7,
    )
    assert after.model_fields_set == before.model_fields_set
    assert after.trainer.lora is not None
    assert after.trainer.lora.model_fields_set == {"rank"}
    assert before.seed == 0


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "train", "name": "a"},
        {"execution": "ray"},
        {"engine.dtype": "float32"},
        {"trainer.num_processes": 2},
    ],
)
def test_the_base_is_shared_where_a_run_may(folder: Path, engine: str, settings: dict[str, Any]) -> None:
    case = replace(on_cpu(folder, LORA), engine=engine).changed({**settings, BASE: "shared"})
    try:
        check_base(case.config, EngineChoice(type=engine, reason="by hand"), serves=True)
    except ConfigError:
        assert not case.may_share_base
    else:
        assert case.may_share_base


def test_what_cannot_fit_is_refused_with_what_would(wide: Path) -> None:
    """By more than the plan may be wrong."""
    case = on_cpu(wide, {"model.max_model_len": 512, "algorithm.batch_size": 16})
    assert too_large(with_share(case, 1 / (1 + ERROR) + 0.01)) == ""
    short = with_share(case, 0.5)
    assert "does not fit: it needs about" in (reason := too_large(short))
    assert "activations of 8,192 tokens" in reason
    assert "and CPU has" in reason
    assert advice(find_change(short)).startswith("The smallest change with which it fits: trainer.")
    assert advice(None).startswith("No change")
    assert too_large(replace(short, engine="vllm")) == ""  # what it takes beside its weights is not known


def test_a_gpu_is_judged_by_weights_alone(folder: Path) -> None:
    case = on_cpu(folder)
    num_bytes = 17 * case.models.policy.parameters
    assert (
        too_large(replace(case, hardware=Hardware(name="GPU", kind="cuda", count=1, memory_bytes=2 * num_bytes))) == ""
    )
    short = replace(case, hardware=Hardware(name="GPU", kind="cuda", count=1, memory_bytes=num_bytes))
    assert "weights, gradients and moments alone need" in too_large(short)


def test_a_smaller_context_is_a_change(wide: Path) -> None:
    """Everything else is small already: long sequences take the memory."""
    case = on_cpu(
        wide, {**LORA, "model.max_model_len": 8192, "model.max_tokens": 64, AGAIN: True, "engine.max_slots": 1}
    )
    case = case.changed({"trainer.optimizer": "adamw_8bit", BASE: "nf4"})
    found = find_change(with_share(case, 0.8))
    assert found is not None
    assert found["model.max_model_len"] in (4096, 2048)
    assert case.changed(found).workload.longest == found["model.max_model_len"]


def test_the_gain_is_a_ratio_of_times() -> None:
    assert 0.01 < bfloat16_speedup(64, 32) < 100
