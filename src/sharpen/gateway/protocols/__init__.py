"""The vendors' APIs: what their requests mean, and how their answers are written.

- `protocol`: what a protocol is, ours or somebody's own; what it knows when it reads a request
- `chat`: OpenAI's Chat Completions, in whose words the others are read
- `chat_schema`: the types of its requests
- `responses`: OpenAI's Responses: its requests
- `responses_events`: its answers, whole and as events; the input of a stored one
- `responses_schema`: the types of its requests
- `messages`: Anthropic's Messages
- `messages_schema`: the types of its requests
- `completions`: OpenAI's old Completions: prompts without a template
"""
