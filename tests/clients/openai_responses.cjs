// An agent in Node with OpenAI's SDK, responses: adds two numbers with a tool, prints the answer.
// In: QUESTION, STREAM, STORE, and the variables of a rollout. Out: the answer.
const OpenAI = require("openai");

const TOOLS = [
  {
    type: "function",
    name: "add",
    description: "Add two numbers.",
    strict: false,
    parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
  },
];

async function ask(client, input, previous) {
  const request = { model: process.env.OPENAI_MODEL, input, tools: TOOLS, store: process.env.STORE === "1" };
  if (previous) request.previous_response_id = previous;
  if (process.env.STREAM !== "1") return client.responses.create(request);
  const stream = client.responses.stream(request);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const response = await stream.finalResponse();
  if (text !== response.output_text) throw new Error(`the deltas were ${text}, the whole ${response.output_text}`);
  return response;
}

async function main() {
  const client = new OpenAI({ maxRetries: 0 });
  let input = [{ role: "user", content: process.env.QUESTION }];
  let previous;
  for (let turn = 0; turn < 4; turn++) {
    const response = await ask(client, input, previous);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return console.log(response.output_text);
    const results = calls.map((call) => {
      const { a, b } = JSON.parse(call.arguments);
      return { type: "function_call_output", call_id: call.call_id, output: String(a + b) };
    });
    if (process.env.STORE === "1") [input, previous] = [results, response.id];
    else input = [...input, ...response.output, ...results];
  }
}

main();
