// OpenAI's SDK for Node, whose streams are silent for long: as programs/silent.py does with Python's.

import OpenAI from "openai";
import { KEY, V1, check, runAtOnce } from "./program.mjs";

const [silentS, question, answer] = process.argv.slice(2);
const SILENCES = { before: { first_s: Number(silentS) }, amid: { middle_s: Number(silentS) } };
const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });

const asks = {
  async chat(model, more) {
    const messages = [{ role: "user", content: question }];
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, stream: true, ...more }))
      text += chunk.choices[0]?.delta.content ?? "";
    return text;
  },
  async response(model, more) {
    let last;
    for await (const event of await client.responses.create({ model, input: question, stream: true, ...more }))
      last = event;
    check(last.type === "response.completed", last.type);
    return last.response.output[0].content[0].text;
  },
  async response_helper(model, more) {
    return (await client.responses.stream({ model, input: question, ...more }).finalResponse()).output_text;
  },
};

const features = {};
for (const [name, ask] of Object.entries(asks))
  for (const apis of ["native", "translated"])
    for (const [when, silence] of Object.entries(SILENCES))
      features[`${name} ${apis} ${when}`] = async () => {
        const said = await ask(`${apis}-${when}`, { silence });
        check(said === answer, `${said} in the place of ${answer}`);
      };
await runAtOnce(features);
