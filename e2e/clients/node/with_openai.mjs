// OpenAI's SDK for Node.

import OpenAI from "openai";
import {
  ASK, KEY, LIMITED_KEY, MODEL, PICTURE, PLACE_SCHEMA, V1, WRONG_KEY, WRONG_MODEL, check, refused, run, untilLimited,
} from "./program.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: ASK }];
const chat = { model: MODEL, messages, max_tokens: 100 };
const tools = [{ type: "function", function: { name: "find", parameters: PLACE_SCHEMA, strict: true } }];
const responsesTools = [{ type: "function", name: "find", parameters: PLACE_SCHEMA, strict: true }];
const format = { name: "place", schema: PLACE_SCHEMA, strict: true };

await run({
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    check(names.join() === MODEL, names.join());
  },
  async chat() {
    const answer = await client.chat.completions.create(chat);
    check(answer.choices[0].message.content);
    check(answer.usage.completion_tokens);
  },
  async stream() {
    const stream = client.chat.completions.stream(chat);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    check((await stream.finalChatCompletion()).choices[0].message.content === text);
    check(text);
  },
  async usage() {
    let last;
    const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) last = chunk;
    check(last.usage.completion_tokens);
  },
  async tools() {
    let called;
    const find = ({ place }) => ((called = place), "Paris");
    const runner = client.chat.completions.runTools({
      ...chat,
      tools: [{ type: "function", function: { name: "find", function: find, parse: JSON.parse, parameters: PLACE_SCHEMA } }],
      tool_choice: { type: "function", function: { name: "find" } },
    });
    await runner.done();
    check(called);
    const first = await client.chat.completions.create({ ...chat, tools, tool_choice: "required" });
    const { message } = first.choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Paris" };
    const second = await client.chat.completions.create({ ...chat, tools, messages: [...messages, message, result] });
    check(second.choices[0].message.content);
  },
  async schema() {
    const answer = await client.chat.completions.parse({
      model: MODEL, messages, response_format: { type: "json_schema", json_schema: format },
    });
    check(JSON.parse(answer.choices[0].message.content).place);
  },
  async image() {
    const content = [
      { type: "text", text: ASK },
      { type: "image_url", image_url: { url: `data:image/png;base64,${PICTURE}` } },
    ];
    const answer = await client.chat.completions.create({ ...chat, messages: [{ role: "user", content }] });
    check(answer.usage.prompt_tokens > 200);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: MODEL, input: ["a text", "another"] });
    check(answer.data.length === 2 && answer.data[0].embedding.length > 1);
  },
  async responses() {
    const answer = await client.responses.create({ model: MODEL, input: ASK, instructions: "Be short." });
    check(answer.output_text);
    check((await client.responses.retrieve(answer.id)).output_text === answer.output_text);
    const parsed = await client.responses.parse({
      model: MODEL, input: ASK, text: { format: { type: "json_schema", ...format } },
    });
    check(JSON.parse(parsed.output_text).place);
  },
  async "responses stream"() {
    const stream = client.responses.stream({ model: MODEL, input: ASK });
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    check((await stream.finalResponse()).output_text === text);
    check(text);
  },
  async "responses continue"() {
    const first = await client.responses.create({ model: MODEL, input: ASK });
    const second = await client.responses.create({ model: MODEL, input: "And then?", previous_response_id: first.id });
    check(second.usage.input_tokens > first.usage.input_tokens);
  },
  async "responses tools"() {
    const first = await client.responses.create({
      model: MODEL, input: ASK, tools: responsesTools, tool_choice: "required",
    });
    const call = first.output.find((item) => item.type === "function_call");
    const second = await client.responses.create({
      model: MODEL, tools: responsesTools, previous_response_id: first.id,
      input: [{ type: "function_call_output", call_id: call.call_id, output: "Paris" }],
    });
    check(second.output_text);
  },
  async "wrong model"() {
    const error = await refused(404, () => client.chat.completions.create({ ...chat, model: WRONG_MODEL }));
    check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },
  async "wrong key"() {
    const asked = client.withOptions({ apiKey: WRONG_KEY });
    const error = await refused(401, () => asked.chat.completions.create(chat));
    check(error instanceof OpenAI.AuthenticationError);
  },
  async retry() {
    const limited = client.withOptions({ apiKey: LIMITED_KEY });
    const short = { ...chat, max_tokens: 1 };
    await untilLimited(() => limited.chat.completions.create(short));
    check((await limited.withOptions({ maxRetries: 3 }).chat.completions.create(short)).choices.length);
  },
});
