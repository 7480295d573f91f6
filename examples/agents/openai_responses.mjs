// The openai package 7.57.0, Responses: npm install openai@7.57.0 zod@4.6.7
// It reads OPENAI_BASE_URL (with /v1) and OPENAI_API_KEY. Usage: node openai_responses.mjs PROMPT
import OpenAI from "openai";
import { z } from "zod";
import { converse, createTools } from "./tools.mjs";

const client = new OpenAI();
const known = createTools(delegate);
const tools = Object.entries(known).map(([name, { description, schema }]) => ({
  type: "function",
  name,
  description,
  parameters: z.toJSONSchema(schema),
}));
let last;

async function call({ name, arguments: text, call_id }) {
  const { schema, run } = known[name];
  const output = await Promise.resolve(text)
    .then((text) => run(schema.parse(JSON.parse(text))))
    .catch((error) => `Error: ${error.message}`);
  return { type: "function_call_output", call_id, output };
}

async function ask(input, signal) {
  for (;;) {
    let calls;
    try {
      last = await client.responses.stream({ model: "policy", input, tools }, { signal }).finalResponse();
      calls = last.output.filter((item) => item.type === "function_call");
    } catch (error) {
      if (signal?.aborted) return input;
      throw error;
    }
    input = [...input, ...last.output, ...(await Promise.all(calls.map(call)))];
    if (!calls.length) return input;
  }
}

async function delegate(task) {
  await ask([{ role: "user", content: task }]);
  return last.output_text;
}

await converse(ask);
console.log(last.output_text);
