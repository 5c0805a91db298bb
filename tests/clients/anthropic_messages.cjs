// An agent in Node with Anthropic's SDK: adds two numbers with a tool, prints the answer.
// In: QUESTION, STREAM, and the variables of a rollout. Out: the answer.
const Anthropic = require("@anthropic-ai/sdk");

const TOOLS = [
  {
    name: "add",
    description: "Add two numbers.",
    input_schema: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
  },
];

async function ask(client, messages) {
  const request = { model: process.env.ANTHROPIC_MODEL, max_tokens: 200, messages, tools: TOOLS };
  if (process.env.STREAM !== "1") return client.messages.create(request);
  let text = "";
  const stream = client.messages.stream(request).on("text", (delta) => (text += delta));
  const message = await stream.finalMessage();
  const whole = message.content.filter((block) => block.type === "text").map((block) => block.text);
  if (text !== whole.join("")) throw new Error(`the deltas were ${text}, the whole ${whole}`);
  return message;
}

async function main() {
  const client = new Anthropic({ maxRetries: 0 });
  const messages = [{ role: "user", content: process.env.QUESTION }];
  for (let turn = 0; turn < 4; turn++) {
    const message = await ask(client, messages);
    if (message.stop_reason !== "tool_use") return console.log(message.content[0].text);
    messages.push({ role: "assistant", content: message.content });
    const results = message.content.filter((block) => block.type === "tool_use").map((block) => {
      const { a, b } = block.input;
      return { type: "tool_result", tool_use_id: block.id, content: String(a + b) };
    });
    messages.push({ role: "user", content: results });
  }
}

main();
