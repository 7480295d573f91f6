// The @anthropic-ai/sdk package 1.12.0: npm install @anthropic-ai/sdk@1.12.0 zod@4.6.7
// Messages. It reads ANTHROPIC_BASE_URL (without /v1) and ANTHROPIC_API_KEY. Usage: node anthropic_sdk.mjs PROMPT
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { converse, createTools } from "./tools.mjs";

const client = new Anthropic();
const tools = Object.entries(createTools(delegate)).map(([name, { description, schema, run }]) =>
  betaZodTool({ name, description, inputSchema: schema, run: (input) => run(input) }),
);
let last;

async function ask(messages, signal) {
  const runner = client.beta.messages.toolRunner(
    { model: "policy", max_tokens: 4096, messages, tools, stream: true, max_iterations: 50 },
    { signal },
  );
  try {
    for await (const stream of runner) last = await stream.finalMessage();
  } catch (error) {
    if (!signal?.aborted) throw error;
  }
  return runner.params.messages;
}

function text() {
  return last.content.map((block) => block.text ?? "").join("");
}

async function delegate(task) {
  await ask([{ role: "user", content: task }]);
  return text();
}

await converse(ask);
console.log(text());
