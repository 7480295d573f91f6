// LangChain 1.5.14 for JavaScript: npm install langchain@1.5.14 @langchain/openai@1.6.0 @langchain/core@1.4.0 zod@4.6.7
// Chat completions. Base URL and key are arguments of ChatOpenAI. Usage: node langchain.mjs PROMPT
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { converse, createTools } from "./tools.mjs";

const { OPENAI_BASE_URL, OPENAI_API_KEY } = process.env;
const model = new ChatOpenAI({
  model: "policy",
  apiKey: OPENAI_API_KEY,
  configuration: { baseURL: OPENAI_BASE_URL },
});
const failed = (error) => `Error: ${error.message}`;
const tools = Object.entries(createTools(delegate)).map(([name, { description, schema, run }]) =>
  tool((input) => Promise.resolve(input).then(run).catch(failed), { name, description, schema }),
);
const agent = createAgent({ model, tools });

async function ask(messages, signal) {
  let history = messages;
  try {
    const states = await agent.stream({ messages }, { streamMode: "values", recursionLimit: 100, signal });
    for await (const state of states) history = state.messages;
  } catch (error) {
    if (!signal?.aborted) throw error;
  }
  return history;
}

async function delegate(task) {
  return (await ask([{ role: "user", content: task }])).at(-1).content;
}

console.log((await converse(ask)).at(-1).content);
