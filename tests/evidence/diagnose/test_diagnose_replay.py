"""Replayed tokens are older by design: what a diagnosis expects of them."""

from diagnose_plants import STEPS, config, curves, run_data

from sharpen.evidence.diagnose.diagnosis import diagnose


def names(**metrics: list[float]) -> list[str]:
    return [found.name for found in diagnose(run_data(metrics=curves(**metrics)))]


def test_the_distance_to_older_policies_is_not_that_of_one_step() -> None:
    """0.25 nats to policies 3 steps back on average are 0.06 a step, 0.5 are 0.125. Red when `kl_blow_up` does not ask
    for the age of what was replayed."""
    age = {"batch__replay_age_mean": [6.0] * STEPS, "trainer__num_updates": [2.0] * STEPS}
    assert names(trainer__kl_old=[0.25] * STEPS) == ["kl_blow_up"]
    assert names(trainer__kl_old=[0.25] * STEPS, **age) == []
    assert names(trainer__kl_old=[0.5] * STEPS, **age) == ["kl_blow_up"]


def test_the_advice_for_clipped_tokens_names_the_staleness() -> None:
    metrics = curves(trainer__clip_fraction=[0.5] * STEPS)
    settings = config(sampling={"replay_share": 1.0})
    (found,) = diagnose(run_data(metrics=metrics, config=settings))
    assert found.name == "clip_fraction"
    assert "sampling.max_staleness" in found.advice
    (found,) = diagnose(run_data(metrics=metrics))
    assert "sampling.max_staleness" not in found.advice
