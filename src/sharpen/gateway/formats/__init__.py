"""The formats in which models write tool calls and reasoning: one file for each family.

- `format`: what a format is, how a text is parsed by one, and reasoning between two tags
- `table`: the formats by name, and which one a template has
- `hermes`: Hermes, Qwen 2.5 and 3: JSON between tags; the shortest to begin with
- `qwen3_coder`: Qwen3-Coder, Qwen 3.5: elements within `<function=name>`
- `llama`: Llama 3 and 4: one JSON object
- `pythonic`: Llama 3.2 and 4, ToolACE, LFM2: a list of Python calls
- `mistral`: Mistral, and Magistral's reasoning
- `deepseek`: DeepSeek V3, R1 and V3.1
- `kimi`: Kimi K2
- `glm`: GLM 4.5 to 4.7
- `gemma`: Gemma 4 and FunctionGemma
- `harmony`: gpt-oss
- `scan`: walks through a text from call to call, and reads the JSON within it
- `schema`: values written without their type, by the schema of the tool
- `grammar`: writes a grammar of llguidance, rule by rule
- `tool_rules`: rules of a tool's arguments that are not JSON: elements, and values in Gemma's and Python's notation
"""
