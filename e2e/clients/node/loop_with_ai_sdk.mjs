// Vercel's AI SDK in a loop over Responses: thoughts, two calls at a time, their results, and the answer to those.

import { execSync } from "node:child_process";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { KEY, MODEL, V1, check, run } from "./program.mjs";

const model = createOpenAI({ baseURL: V1, apiKey: KEY })(MODEL);
const schema = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };

const bash = tool({
  description: "Run a command.",
  inputSchema: jsonSchema(schema),
  execute: ({ command }) => execSync(command, { encoding: "utf8" }),
});

// With `store`, the second step refers to the items of the first; without, it has them.
const asked = (store) => ({
  model, tools: { bash }, prompt: "Work.", stopWhen: stepCountIs(3), maxRetries: 0, providerOptions: { openai: { store } },
});

async function checkLoop(result) {
  check((await result.steps).length === 2, "not two steps");
  check((await result.text) === "It said: 42-one 42-two", await result.text);
}

await run({
  async responses() {
    for (const store of [true, false]) await checkLoop(await generateText(asked(store)));
  },
  async "responses stream"() {
    for (const store of [true, false]) {
      const result = streamText(asked(store));
      await result.consumeStream();
      await checkLoop(result);
    }
  },
});
