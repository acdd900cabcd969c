// Vercel's AI SDK: its provider for OpenAI-compatible servers (chat), and its OpenAI provider (Responses by default).

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import {
  ASK, KEY, LIMITED_KEY, MODEL, PICTURE, PLACE_SCHEMA, V1, WRONG_KEY, WRONG_MODEL, check, refused, run, untilLimited,
} from "./program.mjs";

const compatible = (apiKey = KEY) =>
  createOpenAICompatible({ name: "plait", baseURL: V1, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: V1, apiKey: KEY });
const chat = compatible()(MODEL);
const responses = openai(MODEL);
const ask = (model, more) => generateText({ model, prompt: ASK, maxRetries: 0, ...more });

async function checkStream(model) {
  let failure;
  const result = streamText({ model, prompt: ASK, maxRetries: 0, onError: ({ error }) => (failure = error) });
  let text = "";
  for await (const delta of result.textStream) text += delta;
  if (failure) throw failure;
  check(text);
  return await result.usage;
}

// The first step has to call the tool; the next one gets its result.
async function checkTools(model) {
  let called;
  const find = tool({
    description: "Find a place.",
    inputSchema: jsonSchema(PLACE_SCHEMA),
    execute: ({ place }) => ((called = place), "Paris"),
  });
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
  const result = await ask(model, { tools: { find }, prepareStep, stopWhen: stepCountIs(2) });
  check(called, "not called");
  check(result.steps.length === 2 && result.text, "no answer after the call");
}

const output = Output.object({ schema: jsonSchema(PLACE_SCHEMA) });

await run({
  async chat() {
    const result = await ask(chat, { system: "Be short." });
    check(result.text);
    check(result.usage.outputTokens);
    check((await ask(openai.chat(MODEL))).text);
  },
  async stream() {
    await checkStream(chat);
  },
  async usage() {
    check((await checkStream(chat)).outputTokens);
  },
  async tools() {
    await checkTools(chat);
  },
  async schema() {
    check((await ask(chat, { output })).output.place);
    check((await ask(responses, { output })).output.place);
  },
  async image() {
    const content = [{ type: "text", text: ASK }, { type: "file", data: PICTURE, mediaType: "image/png" }];
    const result = await ask(chat, { prompt: undefined, messages: [{ role: "user", content }] });
    check(result.usage.inputTokens > 200);
  },
  async embeddings() {
    const model = compatible().embeddingModel(MODEL);
    check((await embedMany({ model, values: ["a text", "another"] })).embeddings.length === 2);
  },
  async responses() {
    check((await ask(responses)).text);
  },
  async "responses stream"() {
    check((await checkStream(responses)).outputTokens);
  },
  async "responses continue"() {
    const first = await ask(responses);
    const { responseId } = first.providerMetadata.openai;
    const second = await ask(responses, { providerOptions: { openai: { previousResponseId: responseId } } });
    check(second.usage.inputTokens > first.usage.inputTokens);
  },
  async "responses tools"() {
    await checkTools(responses);
  },
  async "wrong model"() {
    check(APICallError.isInstance(await refused(404, () => ask(compatible()(WRONG_MODEL)))));
  },
  async "wrong key"() {
    check(APICallError.isInstance(await refused(401, () => ask(compatible(WRONG_KEY)(MODEL)))));
  },
  async retry() {
    const model = compatible(LIMITED_KEY)(MODEL);
    await untilLimited(() => ask(model, { maxOutputTokens: 1 }));
    check((await ask(model, { maxOutputTokens: 1, maxRetries: 3 })).finishReason);
  },
});
