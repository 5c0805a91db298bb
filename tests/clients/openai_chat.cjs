// An agent in Node with OpenAI's SDK, chat completions: adds two numbers with a tool, prints the answer.
// In: QUESTION, STREAM, and the variables of a rollout. Out: the answer.
const OpenAI = require("openai");

const TOOLS = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Add two numbers.",
      parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
    },
  },
];

async function ask(client, messages) {
  const request = { model: process.env.OPENAI_MODEL, messages, tools: TOOLS };
  if (process.env.STREAM !== "1") return (await client.chat.completions.create(request)).choices[0].message;
  const stream = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
  const message = await stream.finalMessage();
  if ((await stream.totalUsage()).completion_tokens === 0) throw new Error("the stream had no usage");
  return message;
}

async function main() {
  const client = new OpenAI({ maxRetries: 0 });
  const messages = [{ role: "user", content: process.env.QUESTION }];
  for (let turn = 0; turn < 4; turn++) {
    const message = await ask(client, messages);
    if (!message.tool_calls?.length) return console.log(message.content);
    messages.push(message);
    for (const call of message.tool_calls) {
      const { a, b } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
    }
  }
}

main();
