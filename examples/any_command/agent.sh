#!/bin/sh
# A ReAct agent with a calculator, in shell: sh, curl, sed and awk. It knows nothing of training.
#
# In: the file `question`; the model by OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Out: the file `answer`, unless
# the model never answers; the exit code is 0 either way.
set -eu

tools='[{"type": "function", "function": {"name": "calculator", "description": "Work out an expression.",
  "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}]'
question=$(sed 's/[\\"]/\\&/g' question)
messages='{"role": "system", "content": "Solve the problem. End with #### and the number."},
  {"role": "user", "content": "'$question'"}'

ask() { # prints the model's message as JSON; fails where curl does
    body=$(printf '{"model": "%s", "max_tokens": 48, "tools": %s, "messages": [%s]}' "$OPENAI_MODEL" "$tools" "$messages")
    reply=$(curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" --data "$body" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json")
    printf '%s' "$reply" | sed 's/.*"message": *\({.*}\), *"finish_reason".*/\1/; s/, *"logprobs":.*//'
}

field() { # the text of a field, as it is written in JSON
    sed -n 's/.*"'"$1"'": *"\(\([^"\\]\|\\.\)*\)".*/\1/p'
}

work_out() { # the value of an expression of numbers; nothing else is run
    expression=$(printf '%s' "$1" | sed -n 's/.*\\"expression\\": *\\"\([-+*\/(). 0-9]*\)\\".*/\1/p')
    result=$(awk "BEGIN { printf \"%.10g\", $expression }" 2>/dev/null) && [ -n "$expression" ] || result=error
    printf '%s' "$result"
}

for turn in 1 2 3; do
    message=$(ask)
    id=$(printf '%s' "$message" | field id)
    if [ -z "$id" ]; then
        printf '%s' "$message" | field content > answer
        exit
    fi
    value=$(work_out "$(printf '%s' "$message" | field arguments)")
    messages="$messages, $message, {\"role\": \"tool\", \"tool_call_id\": \"$id\", \"content\": \"$value\"}"
done
