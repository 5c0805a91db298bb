"""Trinity-RFT's further built-in workflows, by the kind of task that they are for. `registry` has their names.

- `maths`: maths as Qwen2.5-Math is evaluated, and with a reward model
- `react_math`: maths with Python as a tool
- `pictures`: one call with images
- `tool_calls`: tool calls as text
- `rubric`: a judge with rubrics
- `ruler`: a judge that sees all answers of a group
- `web_search`: an agent that searches the web
- `email_search`: an agent that searches mails
- `game`: what games share
- `frozen_lake`: a board of ice
- `sudoku`: a board to fill in
- `alfworld`: ALFWorld, whole and step by step
- `alfworld_process`: the process of one of its games
- `text_worlds`: ScienceWorld, WebShop, InterCode
"""
