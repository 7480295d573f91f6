// The openai package 7.57.0, chat completions: npm install openai@7.57.0 zod@4.6.7
// It reads OPENAI_BASE_URL (with /v1) and OPENAI_API_KEY. Usage: node openai_chat.mjs PROMPT
import OpenAI from "openai";
import { z } from "zod";
import { converse, createTools } from "./tools.mjs";

const client = new OpenAI();
const failed = (error) => `Error: ${error.message}`;
const tools = Object.entries(createTools(delegate)).map(([name, { description, schema, run }]) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: z.toJSONSchema(schema),
    parse: (text) => schema.parse(JSON.parse(text)),
    function: (input) => Promise.resolve(input).then(run).catch(failed),
  },
}));

async function ask(messages, signal) {
  const runner = client.chat.completions.runTools(
    { model: "policy", messages, tools, stream: true },
    { signal, maxChatCompletions: 50 },
  );
  await runner.done().catch((error) => {
    if (!signal?.aborted) throw error;
  });
  return runner.messages;
}

async function delegate(task) {
  return (await ask([{ role: "user", content: task }])).at(-1).content;
}

console.log((await converse(ask)).at(-1).content);
