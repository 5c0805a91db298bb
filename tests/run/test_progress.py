"""How far a run is, as checkpoints hold it: there and back."""

import json
from dataclasses import replace

from sharpen.run.progress import Measurement, Progress
from sharpen.show.monitor.statistics import Evaluation

REWARDS = Evaluation(greedy={"a": 1.0}, sampled={"a": 0.5})
WORSE = Evaluation(greedy={"a": 0.0}, sampled={"a": 0.25})
LOSS, ROWS = {"loss": 0.5, "rows": 2.0}, {"r/0": [1.0, 2], "r/1": [0.5, 1]}


def there_and_back(progress: Progress) -> Progress:
    return Progress.from_json(json.loads(json.dumps(progress.to_json())))


def test_progress_is_what_it_was():
    both = Measurement(rewards=REWARDS, loss=LOSS, rows=ROWS)
    whole = Progress(
        step=3,
        version=6,
        rows=4,
        before=Measurement(rewards=WORSE),
        after=both,
        best=both,
        best_step=2,
        num_evaluated=2,
        order={"position": 1},
        drawn=[[1, 2]],
        roles={"poker/0": 0.1 + 0.2},
        auxiliary_tokens={"judge": 7},
    )
    assert there_and_back(whole) == whole
    assert there_and_back(Progress()) == replace(Progress(), drawn=[])


def test_a_checkpoint_is_best_by_rewards_else_by_losses():
    better, start = Measurement(rewards=REWARDS), Measurement(rewards=WORSE)
    assert better.is_best(None, start, "sampled")
    assert not start.is_best(better, start, "sampled")
    less = Measurement(rows={"r/0": (0.5, 2), "r/1": (0.5, 1)})
    assert less.is_best(None, Measurement(rows=ROWS), "sampled")
    assert not Measurement(rows=ROWS).is_best(less, Measurement(rows=ROWS), "sampled")
