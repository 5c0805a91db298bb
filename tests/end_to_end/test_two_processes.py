"""An explorer and a trainer in processes of their own, through `sharpen run`: together, one after the other, killed."""

import shutil
from pathlib import Path

import pytest
from expert_toys import put_experts
from processes import forked, wait_for

from sharpen.cli.main import main
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_steps
from sharpen.learning.trainer.checkpoint import pointed
from sharpen.placement.exchange.store import Batches, FolderStore

AGENT = """
from sharpen import WorkflowOutput

async def answer(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 6)
"""
STEPS = 4


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    path = tmp_path / "run.yaml"
    path.write_text(
        "workflow: agent.py:answer\n"
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        "name: apart\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: {STEPS}}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 96}}\n"
        "evaluation: {before_and_after: false}\n"
        "check: {enabled: false}\n"
        "certificate: {retrain: 'off'}\n"
        "algorithm: {algorithm_type: grpo, group_size: 4, batch_size: 2, learning_rate: 0.01}\n"
    )
    return path


def half(config: Path, mode: str, *settings: str) -> list[str]:
    chosen = [item for setting in (f"mode={mode}", *settings) for item in ("--set", setting)]
    return ["run", "--config", str(config), *chosen]


def run_dir(config: Path) -> Path:
    return config.parent / "runs" / "Sharpen" / "apart"


def test_a_trainer_learns_from_what_an_explorer_collected_before(config, capsys):
    """Nothing trains meanwhile, so every token is of the model's files."""
    assert main(half(config, "explore")) == 0
    assert f"{STEPS} batches rolled out" in capsys.readouterr().out
    assert main(half(config, "train")) == 0
    out = capsys.readouterr().out
    assert "is running?" not in out
    groups = list(read_groups(run_dir(config) / "run.db"))
    assert len(groups) == 2 * STEPS
    assert {group.version for group in groups} == {0}
    steps = read_steps(run_dir(config) / "run.db")
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.metrics["sync/staleness_max"] for step in steps] == [0, 1, 2, 3]
    assert not certify(run_dir(config)).problems
    assert pointed(run_dir(config), "latest") is not None


def test_two_explorers_of_one_exchange_replace_nothing_of_each_other(config, capsys):
    """Red when a batch is put in place of one that is there (`put_new`), and when an explorer of other settings
    announces itself (`check_others`): the trainer's next start was refused then."""
    shared = (f"exchange={config.parent / 'shared'}", "train_dataset.total_steps=2")

    def explore(machine: str, *settings: str) -> int:
        return main(half(config, "explore", *shared, f"checkpoint_root_dir={config.parent / machine}", *settings))

    other = (
        "import shutil; held.exists() and shutil.copy(held, next(shared.rglob('*1.batch')).with_name('000002.batch'))"
    )
    places = (
        f"from pathlib import Path\nshared, held = (Path({str(config.parent)!r}) / name for name in ('shared', 'held'))"
    )
    (config.parent / "agent.py").write_text(places + AGENT.replace("    messages =", f"    {other}\n    messages ="))
    assert explore("first") == 0
    first, second = sorted((config.parent / "shared").rglob("*.batch"))[1:]
    held = second.rename(config.parent / "held")
    capsys.readouterr()
    assert explore("second") == 0
    out = capsys.readouterr().out
    assert "batch 2: another explorer was faster; these rollouts are dropped" in out
    assert "0 batches rolled out" in out
    assert second.read_bytes() == held.read_bytes()
    assert first.exists()
    assert explore("third", "algorithm.group_size=2") == 2
    assert "this explorer and the one before it on the same exchange" in capsys.readouterr().err
    assert not list((config.parent / "third").rglob("resolved.json"))


def test_a_trainer_replays_the_experts_that_an_explorer_recorded(config, write_toy_model):
    """They travel with the calls through the exchange."""
    model = put_experts(write_toy_model(config.parent / "experts"))
    of_experts = (f"model.model_path={model}", "train_dataset.total_steps=2")
    assert main(half(config, "explore", *of_experts)) == 0
    assert main(half(config, "train", *of_experts)) == 0
    calls = [
        call
        for group in read_groups(run_dir(config) / "run.db")
        for rollout in group.rollouts
        for call in rollout.calls
    ]
    assert {call.routes_NLK.shape[1:] for call in calls} == {(2, 2)}
    steps = read_steps(run_dir(config) / "run.db")
    assert [step.metrics["trainer/rerouted_tokens"] for step in steps] == [0, 0]
    assert steps[0].metrics["trainer/logprob_gap_max"] < 1e-4
    assert not certify(run_dir(config)).problems


def test_both_at_once_bound_how_old_tokens_become(config):
    bound = ("sync.max_staleness=1",)
    with forked("-m", "sharpen.cli.main", *half(config, "train", *bound)) as trainer:
        assert main(half(config, "explore", *bound)) == 0
        _, errors = trainer.communicate(timeout=300)
    assert trainer.returncode == 0, errors
    steps = read_steps(run_dir(config) / "run.db")
    assert max(step.metrics["sync/staleness_max"] for step in steps) <= 1
    assert {group.version for group in read_groups(run_dir(config) / "run.db")} > {0}
    assert not certify(run_dir(config)).problems


@pytest.mark.postgres
def test_two_machines_without_a_shared_disk(config, postgres):
    """Each half with folders of its own: rollouts one way and weights the other go through the database alone."""
    bound = ("sync.max_staleness=1", f"exchange={postgres}", f"name=apart-{config.parent.name}")

    def of(machine: str) -> tuple[str, ...]:
        return (*bound, f"checkpoint_root_dir={config.parent / machine}")

    with forked("-m", "sharpen.cli.main", *half(config, "train", *of("trainer"))) as trainer:
        assert main(half(config, "explore", *of("explorer"))) == 0
        _, errors = trainer.communicate(timeout=300)
    assert trainer.returncode == 0, errors
    (found,) = (config.parent / "trainer" / "Sharpen").iterdir()
    assert {group.version for group in read_groups(found / "run.db")} > {0}
    assert not certify(found).problems
    (there,) = (config.parent / "explorer" / "Sharpen").iterdir()
    for folder in (found, there):
        assert not (folder / "exchange").exists()
        written = [path for path in folder.rglob("*") if path.is_file()]
        assert [path.name for path in written if b"secret-word" in path.read_bytes()] == []


def test_what_lost_weights_sampled_is_rolled_out_again(config):
    """The checkpoint of step 3 is gone, as after a kill; batch 4 was sampled by the weights of that step, which are not
    those that the trainer's second session has at its step 3."""
    few, all_ = (["--set", f"train_dataset.total_steps={steps}"] for steps in (3, STEPS))
    saving = "algorithm.save_interval_steps=2"
    assert main([*half(config, "explore", saving), *few]) == 0
    assert main([*half(config, "train", saving), *few]) == 0
    assert main([*half(config, "explore", saving), *all_]) == 0
    batches = Batches(FolderStore(run_dir(config) / "exchange"))
    lost = batches.get(STEPS)
    shutil.rmtree(run_dir(config) / "global_step_3")
    with forked("-m", "sharpen.cli.main", *half(config, "train", saving), *all_) as trainer:
        wait_for(lambda: batches.get(STEPS) is None, trainer)
        assert main([*half(config, "explore", saving), *all_]) == 0
        output, errors = trainer.communicate(timeout=300)
    assert trainer.returncode == 0, errors
    assert "batch 4 is refused, it is rolled out again" in output
    assert batches.get(STEPS) != lost
    assert [step.step for step in read_steps(run_dir(config) / "run.db")] == [1, 2, 3, 3, 4]
    assert not certify(run_dir(config)).problems


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["mode=train", "model.temperature=0.5"], ["model.temperature: 1.0 there, 0.5 here"]),
        (["mode=train", "algorithm.group_size=2"], ["algorithm.group_size: 4 there, 2 here"]),
    ],
)
def test_halves_of_different_runs_are_told_before_anything_is_loaded(config, capsys, settings, facts):
    assert main([*half(config, "explore"), "--set", "train_dataset.total_steps=1"]) == 0
    assert main(["run", "--config", str(config), *[x for s in settings for x in ("--set", s)]]) != 0
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["mode=explore", "name=null"], ["needs a name"]),
        (["exchange=/tmp/x"], ["mode is 'both'"]),
        (["mode=explore", "sync.style=fully_async"], ["sync.style is 'fully_async'", "leave both out"]),
        (["mode=train", "sync.interval=4", "sync.max_staleness=2"], ["sync.max_staleness is 2", "at least 3"]),
        (["mode=train", "algorithm.algorithm_type=sft"], ["mode is 'train'", "sft"]),
        (["mode=explore", "deterministic=true"], ["mode 'explore'", "deterministic"]),
    ],
)
def test_what_two_processes_cannot_do_is_said_at_once(config, capsys, settings, facts):
    chosen = [item for setting in settings for item in ("--set", setting)]
    assert main(["run", "--config", str(config), *chosen]) != 0
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts), said
