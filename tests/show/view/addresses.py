"""What tests of the pages share: the addresses of all of them, the token, text that wants to be more than text."""

TOKEN = "the-token"
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b[0m \u202egnirts \u2066x\ud800"
    "</textarea></script>{{ 7 * 7 }} javascript:alert(3) '\"><svg onload=alert(4)>"
)
HOSTILE_ROLLOUT = "step-1/train/4/1"

PAGES = (
    "/",
    "/run/{run}",
    "/run/{run}/series.json?name=reward/mean",
    "/run/{run}/tasks",
    "/run/{run}/task?id=train/4",
    "/run/{run}/step/2",
    "/run/{run}/rollouts",
    "/run/{run}/rollout/t5",
    "/run/{run}/rollout/t5/tokens.json?call=0",
    "/static/view.css",
)
"""Without `/events`, which does not end."""
