// The @openai/agents package 0.20.0: npm install @openai/agents@0.20.0 zod@4.6.7
// Responses. It reads OPENAI_BASE_URL (with /v1) and OPENAI_API_KEY. Usage: node openai_agents.mjs PROMPT
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { converse, createTools } from "./tools.mjs";

setTracingDisabled(true);
process.on("SIGINT", () => {}); // without a listener that stays, the SDK ends the process after an interruption
const tools = Object.entries(createTools(delegate)).map(([name, { description, schema, run }]) =>
  tool({ name, description, parameters: schema, execute: (input) => run(input) }),
);
const agent = new Agent({ name: "agent", model: "policy", tools });
let last;

async function ask(messages, signal) {
  const result = await run(agent, messages, { stream: true, maxTurns: 50, signal });
  try {
    for await (const _ of result);
  } catch (error) {
    if (!signal?.aborted) throw error;
  }
  last = result.finalOutput;
  return result.history;
}

async function delegate(task) {
  await ask([{ role: "user", content: task }]);
  return last;
}

await converse(ask);
console.log(last);
