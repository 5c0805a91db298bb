"""Memory by role: by hand, and how it moves with the settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_toys import CPU, case_of, gpu, model_config, run_config, write_config

from sharpen.evidence.certificate.gradient_probe import probe_bytes
from sharpen.learning.recipe import EngineType
from sharpen.run.plan.memory import GAPS, DeviceMemory, Item, in_flight, offloaded_bytes, places, slot_length
from sharpen.run.plan.predict import Plan, plan
from sharpen.run.plan.workload import expected

P = 500 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64 + 2 * 16) + 64
"""Parameters of the toy: Qwen3 has two norms of a head besides."""
LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
"""Those of the linear layers in its blocks, which a frozen model keeps in bfloat16 on a GPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), model_config())


def planned(
    folder: Path, settings: dict[str, Any] | None = None, hardware: Any = None, engine: EngineType = "embedded"
) -> Plan:
    return plan(case_of(run_config(folder, settings), hardware, engine=engine), suggests=False)


def items(found: Plan) -> dict[str, int]:
    return {item.role: item.num_bytes for place in found.places for item in place.items}


def test_weights_gradients_and_moments_by_hand(folder: Path) -> None:
    """4 bytes a weight, 4 its gradient, 8 its moments, whatever it is computed in; 2 in an engine on a GPU."""
    found = items(planned(folder))
    assert found["policy: weights"] == 4 * P
    assert found["policy: gradients"] == 4 * P
    assert found["policy: moments"] == 8 * P
    assert found["reference: weights"] == 4 * P - 2 * LINEAR  # grpo has a KL term
    assert found["engine: weights"] == 2 * P
    assert "critic: weights" not in found


def test_gradients_are_compared_only_where_that_fits(tmp_path: Path) -> None:
    """The run does without, so that nothing is chosen or refused for it. Break: keep it whatever is free."""
    folder = write_config(tmp_path, model_config(hidden_size=1024, vocab_size=131_072))
    comparing = "comparing gradients"
    (place,) = planned(folder, {}, CPU).places
    assert place.without("comparing").peak < place.peak
    for share, is_there in ((1.2, True), (1.05, False)):
        found = planned(folder, {}, replace(CPU, memory_bytes=int(place.peak * share)))
        assert (comparing in items(found)) == is_there


def test_a_large_reference_on_a_processor_is_there_only_while_it_scores(tmp_path: Path) -> None:
    """Two bytes a weight, if its files are in bfloat16: the embeddings too. Break: count it always."""
    folder = write_config(tmp_path, model_config(hidden_size=1024, vocab_size=131_072, dtype="bfloat16"))
    in_bfloat16 = {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}
    (place,) = planned(folder, in_bfloat16, CPU).places
    (found,) = (item for item in place.items if item.role == "reference: weights")
    weights = next(item.num_bytes for item in place.items if item.role == "engine: weights") // 2
    norms = 3 * (2 * 1024 + 2 * 16) + 1024
    assert weights > 100_000_000
    assert (found.when, found.num_bytes) == ("scoring", 2 * weights + 2 * norms)
    on_gpu = planned(folder, in_bfloat16, gpu(16))
    assert [item.when for item in on_gpu.places[0].items if item.role == found.role] == ["always"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("adamw_8bit", 2 * P + P // 32), ("paged_adamw_8bit", 2 * P + P // 32), ("muon", 4 * P + 4 * 500 * 64)],
)
def test_other_optimizers_keep_less(folder: Path, kind: str, expected: int) -> None:
    """Two bytes and two scales for each 256 weights; Muon one moment, but AdamW's two for the embeddings."""
    found = items(planned(folder, {"trainer.optimizer": kind}))
    assert found["policy: moments"] == expected
    assert found["policy: gradients"] == 4 * P


def test_of_one_type_and_in_one_process_trainer_and_engine_have_one_copy(folder: Path) -> None:
    one = {"engine.dtype": "float32"}
    assert "engine: weights" not in items(planned(folder, one))
    assert items(planned(folder, one, engine="vllm"))["engine: weights"] == 4 * P
    for apart in ({"sync.style": "fully_async"}, {"trainer.num_processes": 2}, {"trainer.lora": {"rank": 2}}):
        assert items(planned(folder, one | apart, gpu(16, 2)))["engine: weights"] == 4 * P


def test_processes_share_out_what_is_trained(folder: Path) -> None:
    """A half each on two GPUs, rounded up; beside it the vocabulary and two layers, and once each model whole."""
    found = planned(folder, {"trainer.num_processes": 2}, gpu(16, 2))
    (place,), held = found.places, items(found)
    assert (place.count, found.missing_devices) == (2, 0)
    assert held["policy: weights"] == held["policy: gradients"] == 2 * P
    assert held["reference: weights"] == 2 * P - LINEAR
    assert held["policy: moments"] == 4 * P
    assert held["engine: weights"] == 2 * P
    layer = (P - 500 * 64) // 3
    assert held["gathered weights"] == 4 * 500 * 64 + 2 * 2 * layer
    assert held["a model, read whole"] == 4 * P
    assert planned(folder, {"trainer.num_processes": 2}, gpu(16, 1)).missing_devices == 1


def test_ray_gives_engines_gpus_of_their_own_unless_they_share(folder: Path) -> None:
    apart = planned(folder, {"cluster.num_workers": 1}, gpu(16, 2))
    assert [(place.name, place.count) for place in apart.places] == [("trainer", 1), ("engine", 1)]
    assert not {item.role for item in apart.places[0].items} & {
        item.role for item in apart.places[1].items if ":" in item.role
    }
    assert apart.to_json()["comparable_mb"] is None
    together = planned(folder, {"cluster.colocate": True}, gpu(16, 1))
    assert [(place.name, place.count) for place in together.places] == [("trainer and engine", 1)]
    assert together.missing_devices == 0


@pytest.mark.parametrize(("base", "of_linear"), [("shared", 2), ("nf4", 0.5 + 1 / 64)])
def test_a_shared_base_is_there_once(folder: Path, base: str, of_linear: float) -> None:
    """The engine holds the linear layers of the blocks for both, in its own type or in 4 bits; nothing is merged."""
    linear = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    adapters = 3 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    found = items(planned(folder, {"trainer.lora": {"rank": 4, "base": base}}))
    assert found["policy: weights"] == 4 * (P - linear + adapters)
    assert found["engine: weights"] == 2 * (P - linear) + of_linear * linear
    assert "merged weights" not in found
    rows = items(planned(folder, {"trainer.lora": {"rank": 4, "base": base}, "algorithm.algorithm_type": "sft"}))
    assert rows["policy: weights"] == 4 * (P - linear + adapters) + of_linear * linear


@pytest.mark.parametrize("tied", [True, False])
def test_files_in_bfloat16_are_never_in_float32_under_adapters(tmp_path: Path, tied: bool) -> None:
    """The trainer has norms and adapters of its own, and the engine's embeddings; on a CPU there is no cache while it
    loads."""
    folder = write_config(tmp_path, model_config(tied=tied, dtype="bfloat16"))
    types = {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}
    found = planned(folder, {"trainer.lora": {"rank": 4, "base": "shared"}, **types}, CPU)
    adapters = 3 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    tables = 500 * 64 * (1 if tied else 2)
    assert items(found)["policy: weights"] == 4 * (P - LINEAR - 500 * 64 + adapters)
    assert items(found)["engine: weights"] == 2 * (P - 500 * 64 + tables)
    assert items(found)["the model's file, mapped"] == 2 * (P - 500 * 64 + tables)
    assert not any(item.role == GAPS and item.when == "loading" for item in found.places[0].items)
    in_4_bits = planned(folder, {"trainer.lora": {"rank": 4, "base": "nf4"}, **types}, CPU)
    assert not any(item.when == "loading" for item in in_4_bits.places[0].items)  # layer by layer
    ahead = planned(folder, {"sync.style": "fully_async", **types}, CPU)
    for plan_of, whens in ((found, {"generating"}), (ahead, {"always"})):
        assert {item.when for item in plan_of.places[0].items if item.role == "engine: KV cache"} == whens


def test_comparing_gradients_takes_the_model_once_more_or_some_blocks(folder: Path) -> None:
    """Float64 beside a trainer in float32, with a copy and three gradients of each weight that trains."""
    name, full = "comparing gradients", {"engine.dtype": "float32", "trainer.dtype": "float32"}
    assert items(planned(folder, full, CPU))[name] == 8 * P + 24 * P
    assert items(planned(folder, {**full, "trainer.dtype": "bfloat16"}, CPU))[name] == 4 * P + 16 * P
    assert items(planned(folder, {**full, "trainer.lora": {"rank": 4}}, CPU))[name] == 8 * P
    assert name not in items(planned(folder, {**full, "check.gradients": False, "certificate.retrain": "off"}, CPU))
    assert name not in items(planned(folder, full, gpu(16)))  # on the host
    large, block = 600_000_000, 15_000_000
    assert probe_bytes(large, block, 0, rounded=True) == 16 * block + 400 * 2**20
    assert probe_bytes(large, block, large, rounded=True) == 16 * block + 400 * 2**20 + 16 * 200_000_000
    assert probe_bytes(large, 0, 0, rounded=True) == 4 * large
    in_4_bits = 440_000_000  # half a byte each, and four for each 64
    assert (
        probe_bytes(large, block, 0, rounded=True, in_4_bits=in_4_bits)
        == 16 * block + 400 * 2**20 + 220_000_000 + 27_500_000
    )


def test_comparing_holds_the_4_bits_of_a_large_model(tmp_path: Path) -> None:
    """Red when the plan does not say which weights they are, or counts gaps between them. A model of 150M, which is
    read block by block."""
    folder = write_config(tmp_path, model_config(hidden_size=1024, vocab_size=131_072))
    linear = 3 * (2 * 1024 * 64 + 2 * 1024 * 32 + 3 * 1024 * 160)
    plans = [planned(folder, {"trainer.lora": {"rank": 4, "base": base}}, CPU) for base in ("shared", "nf4")]
    own, in_4_bits = (items(plan) for plan in plans)
    assert in_4_bits["comparing gradients"] == own["comparing gradients"]
    assert in_4_bits["weights in 4 bits, to compare"] == linear // 2 + linear // 16
    gaps = [
        [item.num_bytes for item in plan.places[0].items if item.role == GAPS and item.when == "comparing"]
        for plan in plans
    ]
    assert len(gaps[0]) == 1
    assert gaps[0] == gaps[1]


def test_what_is_offloaded_lies_on_the_host(folder: Path) -> None:
    assert offloaded_bytes(case_of(run_config(folder, {"trainer.cpu_offload": True}))) == 20 * P - 2 * LINEAR
    assert not any(
        role.startswith(("policy", "reference")) for role in items(planned(folder, {"trainer.cpu_offload": True}))
    )
    assert offloaded_bytes(case_of(run_config(folder))) == 0


def test_the_inputs_of_layers_that_are_offloaded_lie_on_the_host(folder: Path) -> None:
    """All but one of three, of as many tokens as the role says, in fp32."""
    again = {"trainer.gradient_checkpointing": True}
    role = next(role for role in items(planned(folder, again)) if role.startswith("activations of "))
    num_tokens = int(role.split()[2].replace(",", ""))
    held, offloaded = (
        items(planned(folder, again | more))[role] for more in ({}, {"trainer.offload_activations": True})
    )
    assert held - offloaded == 4 * 2 * num_tokens * 64


def test_a_critic_has_moments_and_gradients_too(folder: Path) -> None:
    found = items(planned(folder, {"algorithm.algorithm_type": "ppo"}))
    assert [found[f"critic: {what}"] for what in ("weights", "gradients", "moments")] == [4 * P, 4 * P, 8 * P]


def test_on_a_cpu_a_step_of_several_updates_keeps_its_start_where_there_is_room(folder: Path) -> None:
    """Weights and two moments once more, if that is at most half of what is left; on a GPU they lie elsewhere."""
    several, role = {"trainer.num_minibatches": 2}, "start of a step, to go back to"
    assert items(planned(folder, several, CPU))[role] == 12 * P
    assert items(planned(folder, {"trainer.epochs": 2, "trainer.num_processes": 2}, CPU))[role] == 12 * P
    assert items(planned(folder, several | {"algorithm.algorithm_type": "ppo"}, CPU))[role] == 24 * P
    assert role not in items(planned(folder, {}, CPU))
    assert role not in items(planned(folder, several))
    small = replace(CPU, memory_bytes=40 * P)
    assert role not in items(planned(folder, several, small))


def test_adapters_train_alone_and_are_their_own_reference(folder: Path) -> None:
    """Rank 4 on each of the seven layers of a block; frozen linear layers lie in bfloat16 on a GPU."""
    adapters = 3 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    linear = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    found = items(planned(folder, {"trainer.lora": {"rank": 4}}))
    assert found["policy: weights"] == 4 * (P + adapters) - 2 * linear
    assert found["policy: moments"] == 8 * adapters
    assert "reference: weights" not in found
    assert found["merged weights"] == 2 * linear  # on their way to the engine


def test_adapters_of_policies_lie_in_the_engine_and_nothing_is_merged(folder: Path) -> None:
    """The trained ones and, once for both policies that follow it, the snapshot; in bfloat16 on a GPU."""
    adapters = 3 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    follow = {"follow": "trained", "every": 2}
    for policies, copies in ({"rival": {"follow": "original"}}, 1), ({"rival": follow, "other": follow}, 2):
        named = {f"policies.{name}": policy for name, policy in policies.items()}
        found = items(planned(folder, {"trainer.lora": {"rank": 4}, **named}))
        assert found["engine: adapters"] == copies * 2 * adapters
        assert "merged weights" not in found
    assert "engine: adapters" not in items(planned(folder, {"trainer.lora": {"rank": 4}}))


def test_a_teacher_and_auxiliary_models_lie_beside(folder: Path, tmp_path: Path) -> None:
    larger = write_config(tmp_path / "larger", model_config(num_hidden_layers=6))
    settings = {
        "algorithm.algorithm_type": "jsd",
        "distill.teacher_path": str(larger),
        "auxiliary_models.judge": {"model_path": str(folder), "max_model_len": 128},
    }
    found = items(planned(folder, settings))
    assert found["teacher: weights"] == 4 * (2 * P - 500 * 64 - 64) - 2 * 2 * LINEAR
    assert found["auxiliary judge: weights"] == 2 * P
    assert "reference: weights" not in found
    del settings["distill.teacher_path"]
    several = {"distill.teachers": {"maths": str(larger), "code": str(folder)}, "distill.teacher_key": "domain"}
    of_several = items(planned(folder, settings | several))
    assert of_several["teacher maths: weights"] == found["teacher: weights"]
    assert of_several["teacher code: weights"] == 4 * P - 2 * LINEAR


def test_an_average_of_the_weights_that_teaches_is_one_more_copy_of_them(folder: Path) -> None:
    """At rest, and in the start of a step: weights, two moments and the average."""
    own = {"distill.own_weights": "current", "distill.own_decay": 0.9, "distill.context": "{prompt} {solution}"}
    settings = {"algorithm.algorithm_type": "jsd", "trainer.num_minibatches": 2, **own}
    found = items(planned(folder, settings, CPU))
    assert found["teacher: average"] == 4 * P
    assert found["start of a step, to go back to"] == 16 * P


def test_both_answers_of_a_pair_go_together(folder: Path) -> None:
    """A prompt of 100 and two answers of 50 tokens, in a micro-batch that has room for one of them."""
    settings = {"algorithm.algorithm_type": "dpo", "trainer.max_tokens_per_micro_batch": 150}
    config = run_config(folder, settings)
    found = plan(case_of(config, workload=expected(config, 100, 50)), suggests=False)
    assert "activations of 200 tokens" in items(found)


def test_vllm_gets_weights_by_a_file_in_memory(folder: Path) -> None:
    assert items(planned(folder, hardware=CPU, engine="vllm"))["file of weights for vLLM"] == 4 * P
    assert "file of weights for vLLM" not in items(planned(folder, engine="vllm"))


@pytest.mark.parametrize("name", ["sft", "cpt", "dpo"])
def test_learning_from_rows_needs_no_engine(folder: Path, name: str) -> None:
    found = items(planned(folder, {"algorithm.algorithm_type": name}))
    assert not any(role.startswith("engine") for role in found)
    assert ("reference: weights" in found) == (name == "dpo")


def test_the_cache_by_hand(folder: Path) -> None:
    """8 rollouts: 32 slots and one of scratch, of 256 positions of 384 bytes; with less, as many as have room."""
    assert items(planned(folder))["engine: KV cache"] == 33 * 256 * 384
    assert items(planned(folder, {"engine.kv_cache_mb": 1}))["engine: KV cache"] == 11 * 256 * 384
    assert items(planned(folder, {"engine.max_slots": 4}))["engine: KV cache"] == 5 * 256 * 384
    # vLLM reserves what all its slots need, within the budget.
    assert items(planned(folder, engine="vllm"))["engine: KV cache"] == 256 * 256 * 384
    # On a CPU what no sequence has touched costs nothing; 4 bytes a number.
    assert items(planned(folder, hardware=CPU))["engine: KV cache"] == 9 * 256 * 768
    # In blocks no slot is there for padding rows alone: they write to one position; and positions beyond the longest
    # sequence cost nothing.
    config = run_config(folder, {"engine.dtype": "bfloat16"})
    rounded = plan(case_of(config, CPU, workload=expected(config, 100, 50)), suggests=False)
    assert items(rounded)["engine: KV cache"] == 8 * 150 * 384


def test_slots_grow_by_half_in_buckets() -> None:
    lengths = (10, 256, 257, 400, 4000)
    assert [slot_length(length, 4096, blocks=False) for length in lengths] == [256, 256, 384, 576, 4096]
    assert [slot_length(length, 4096, blocks=True) for length in lengths] == [256, 256, 512, 512, 4096]
    assert slot_length(10, 100, blocks=False) == slot_length(10, 100, blocks=True) == 128


def test_in_flight_is_the_step_or_the_evaluation(folder: Path) -> None:
    assert in_flight(case_of(run_config(folder))) == 8
    evaluated = run_config(folder, {"evaluation.before_and_after": True, "evaluation.max_tasks": 100})
    assert in_flight(case_of(evaluated)) == 100
    for counted, wanted in ((1, 8), (40, 40)):  # the tasks that there are
        case = case_of(evaluated)
        assert in_flight(replace(case, workload=replace(case.workload, evaluated=counted))) == wanted


def test_a_peak_is_that_of_the_fuller_phase() -> None:
    place = DeviceMemory(
        name="GPU",
        count=1,
        capacity=119,
        items=(
            Item(role="a", num_bytes=100),
            Item(role="b", num_bytes=10, when="training"),
            Item(role="c", num_bytes=20, when="generating"),
        ),
    )
    assert place.peak == 120
    assert not place.fits


def test_gaps_are_a_share_of_what_is_held(folder: Path) -> None:
    """On a GPU of everything; on a CPU of what comes and goes, while what an engine's step took is not given back, and
    a cache comes from the system."""
    for hardware, shares in (
        (gpu(16), {"always": 0.05, "training": 0.05, "generating": 0.05}),
        (CPU, {"training": 0.45, "comparing": 0.45}),
    ):
        (place,) = planned(folder, {"engine.dtype": "float32"}, hardware).places
        gapless = (GAPS, "engine: KV cache") if hardware is CPU else (GAPS,)
        held = {
            when: sum(i.num_bytes for i in place.items if i.when == when and i.role not in gapless) for when in shares
        }
        gaps = {item.when: item.num_bytes for item in place.items if item.role == GAPS}
        assert gaps == {when: int(share * held[when]) for when, share in shares.items()}


def test_certain_is_what_nobody_can_do_without(folder: Path) -> None:
    (sure,) = places(case_of(run_config(folder)), certain=True)
    assert {item.role for item in sure.items} == {
        "policy: weights",
        "policy: gradients",
        "policy: moments",
        "reference: weights",
        "engine: weights",
    }


def test_larger_settings_never_take_less(folder: Path, tmp_path: Path) -> None:
    def peak(settings: dict[str, Any], where: Path = folder) -> int:
        return planned(where, settings).places[0].peak

    for key, values in {
        "trainer.max_tokens_per_micro_batch": (256, 1024),
        "model.max_model_len": (256, 1024),
        "algorithm.group_size": (2, 64),
        "engine.max_slots": (1, 64),
        "trainer.lora": ({"rank": 2}, None),
    }.items():
        peaks = [peak({key: value}) for value in values]
        assert peaks == sorted(peaks), key
    deeper = write_config(tmp_path / "deeper", model_config(num_hidden_layers=8))
    assert peak({}, deeper) > peak({})
