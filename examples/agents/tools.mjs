// The tools of the agents in JavaScript: each has a description, a zod schema and a function that may throw.
import { exec } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { promisify } from "node:util";
import { z } from "zod";

const path = z.string();

export function createTools(delegate) {
  return {
    write_file: {
      description: "Write a file.",
      schema: z.object({ path, content: z.string() }),
      run: async ({ path, content }) => (await writeFile(path, content), `Wrote ${path}.`),
    },
    read_file: {
      description: "Read a file.",
      schema: z.object({ path }),
      run: ({ path }) => readFile(path, "utf8"),
    },
    edit_file: {
      description: "Replace a text in a file.",
      // The default makes zod add a key to the arguments that the model wrote, and some SDKs echo these.
      schema: z.object({ path, old_text: z.string(), new_text: z.string(), all: z.boolean().default(false) }),
      run: async ({ path, old_text, new_text, all }) => {
        const text = await readFile(path, "utf8");
        if (!text.includes(old_text)) throw new Error(`${path} does not contain ${old_text}.`);
        await writeFile(path, all ? text.replaceAll(old_text, new_text) : text.replace(old_text, new_text));
        return `Edited ${path}.`;
      },
    },
    shell: {
      description: "Run a command.",
      schema: z.object({ command: z.string() }),
      run: async ({ command }) => (await promisify(exec)(command)).stdout,
    },
    delegate: {
      description: "Give a task to a sub-agent.",
      schema: z.object({ task: z.string() }),
      run: ({ task }) => delegate(task),
    },
  };
}

// An interrupted agent hears "Go on." once.
export async function converse(ask) {
  const interruption = new AbortController();
  process.once("SIGINT", () => interruption.abort());
  const user = (content) => ({ role: "user", content });
  let history = await ask([user(process.argv[2])], interruption.signal);
  if (interruption.signal.aborted) history = await ask([...history, user("Go on.")]);
  return history;
}
