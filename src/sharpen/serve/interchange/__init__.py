"""Trajectories as other programs write and read them.

In: the groups of a journal; files of other programs. Out: files for them; sessions of a recording.

- `atif`: Harbor's trajectories, there and back
- `openenv`: calls as OpenEnv's trainers take them
- `otel`: spans of OpenTelemetry's conventions for generative AI, there and back
- `traces`: exports of Langfuse and LangSmith
- `messages`: the shapes that messages have in them
- `sessions`: what was read, as sessions of a recording
- `files`: files by what they hold
"""
