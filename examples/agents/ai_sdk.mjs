// The AI SDK 7.0.173 with its three providers: npm install ai@7.0.173 zod@4.6.7 and the package of the provider:
// @ai-sdk/openai@4.0.118 (Responses), @ai-sdk/openai-compatible@3.0.92 (chat completions), @ai-sdk/anthropic@4.0.105 (Messages).
// Usage: node ai_sdk.mjs PROMPT openai|openai-compatible|anthropic
import { isStepCount, streamText, tool } from "ai";
import { converse, createTools } from "./tools.mjs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY } = process.env;
const providers = {
  openai: async () => {
    const { createOpenAI } = await import("@ai-sdk/openai");
    return createOpenAI({ baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })("policy");
  },
  "openai-compatible": async () => {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "areal", baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY })("policy");
  },
  anthropic: async () => {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    // Unlike Anthropic's own SDK, this one wants the base URL with /v1.
    return createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1`, apiKey: ANTHROPIC_API_KEY })("policy");
  },
};
const model = await providers[process.argv[3]]();
const tools = Object.fromEntries(
  Object.entries(createTools(delegate)).map(([name, { description, schema, run }]) => [
    name,
    tool({ description, inputSchema: schema, execute: (input) => run(input) }),
  ]),
);
let last = "";

async function ask(messages, signal) {
  let history = messages;
  const result = streamText({
    model,
    messages,
    tools,
    stopWhen: isStepCount(50),
    abortSignal: signal,
    onStepFinish: ({ response, text }) => {
      history = [...history, ...response.messages];
      last = text;
    },
    onError: ({ error }) => {
      console.error(error);
      process.exitCode = 1;
    },
  });
  await result.consumeStream();
  return history;
}

async function delegate(task) {
  await ask([{ role: "user", content: task }]);
  return last;
}

await converse(ask);
console.log(last);
