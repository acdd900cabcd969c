// A conversation with Vercel's AI SDK: the job and what is said of it are those of programs/conversation.py.

import { execSync } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { KEY, V1 } from "./program.mjs";

const job = JSON.parse(process.argv[2]);
const at = { baseURL: V1, apiKey: KEY };
const picture = readFileSync(job.picture).toString("base64");
const reasoning = { forceReasoning: true, reasoningEffort: "high", reasoningSummary: "auto" };

const [model, providerOptions] = {
  stored: () => [createOpenAI(at)(job.model), { openai: { ...reasoning, store: true } }],
  sent: () => [
    createOpenAI(at)(job.model),
    { openai: { ...reasoning, store: false, include: ["reasoning.encrypted_content"] } },
  ],
  anthropic: () => [
    createAnthropic(at)(job.model), { anthropic: { thinking: { type: "enabled", budgetTokens: 2000 } } },
  ],
  compatible: () => [createOpenAICompatible({ name: "plait", ...at })(job.model), {}],
}[job.kind]();

const schema = (name) => jsonSchema({ type: "object", properties: { [name]: { type: "string" } }, required: [name] });
const tools = {
  bash: tool({
    description: "Run a command.",
    inputSchema: schema("command"),
    execute: ({ command }) => execSync(command, { encoding: "utf8" }),
  }),
  look: tool({
    description: "Show a place.",
    inputSchema: schema("place"),
    execute: () => "shown",
    toModelOutput: () => ({
      type: "content",
      value: [{ type: "image-data", data: picture, mediaType: "image/png" }],
    }),
  }),
};

let history = existsSync(job.history) ? JSON.parse(readFileSync(job.history, "utf8")) : [];
for (const prompt of job.prompts) {
  history.push({ role: "user", content: prompt });
  const asked = { model, providerOptions, tools, messages: history, stopWhen: stepCountIs(8), maxRetries: 0 };
  // Streams and whole answers take turns.
  let result;
  if (job.prompts.indexOf(prompt) === 0) {
    let failure;
    result = streamText({ ...asked, onError: ({ error }) => (failure = error) });
    await result.consumeStream();
    if (failure) throw failure;
  } else {
    result = await generateText(asked);
  }
  console.log(JSON.stringify({ answer: await result.text }));
  const messages = await result.responseMessages;
  history = job.shortened
    ? [{ role: "user", content: "What has been so far: the shell was asked, and answered." }]
    : [...history, ...messages];
}
writeFileSync(job.history, JSON.stringify(history));
