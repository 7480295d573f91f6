// An agent of @openai/agents 0.20.0 with one tool, which it must call: npm install @openai/agents@0.20.0 zod@4.6.7
// Chat completions. A command of a run: it reads the problem, and prints the reward, the share of digits in the code.
import { readFileSync } from "node:fs";
import { Agent, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setOpenAIAPI("chat_completions");
setTracingDisabled(true);
let entered = "";
const enter = tool({
  name: "enter",
  description: "Enter a code.",
  parameters: z.object({ code: z.string().max(8) }),
  execute: ({ code }) => (entered = code),
});
const agent = new Agent({
  name: "agent",
  model: "policy",
  instructions: "You enter codes.",
  tools: [enter],
  toolUseBehavior: "stop_on_first_tool",
  modelSettings: { toolChoice: "required", maxTokens: 48, temperature: 1 },
});
const { task } = JSON.parse(readFileSync(process.env.AREAL_PROBLEM));
await run(agent, task).catch((error) => console.error(error.message)); // such as arguments that are cut off
console.log([...entered].filter((character) => character >= "0" && character <= "9").length / (entered.length || 1));
