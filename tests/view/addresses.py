"""The addresses of the pages, for tests of all of them."""

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
