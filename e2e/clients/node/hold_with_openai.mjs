// OpenAI's SDK for Node, whose calls wait for long: all its settings are the defaults.

import OpenAI from "openai";
import { ASK, KEY, MODEL, V1, check, runAtOnce } from "./program.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY });
const chat = { model: MODEL, messages: [{ role: "user", content: ASK }], max_tokens: 8 };

await runAtOnce({
  async whole() {
    const answer = await client.chat.completions.create(chat);
    check(answer.choices[0].message.content);
  },
  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...chat, stream: true }))
      text += chunk.choices[0]?.delta.content ?? "";
    check(text);
  },
});
