// What the programs for Node share, as programs/program.py does for Python: one line of JSON for each feature.

export const URL = process.env.PLAIT_URL;
export const V1 = `${URL}/v1`;
export const KEY = process.env.PLAIT_KEY;
export const LIMITED_KEY = process.env.PLAIT_LIMITED_KEY;
export const WRONG_KEY = "wrong-key";
export const MODEL = "demo";
export const WRONG_MODEL = "no-such-model";
export const PICTURE =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";
export const PLACE_SCHEMA = {
  type: "object",
  properties: { place: { type: "string" } },
  required: ["place"],
  additionalProperties: false,
};
export const ASK = "Where is the Eiffel Tower?";

const MAX_LIMITED_CALLS = 50;

export function check(holds, what) {
  if (!holds) throw new Error(what ?? "not as expected");
}

// The error with this status that `ask` rejects with.
export async function refused(status, ask) {
  try {
    await ask();
  } catch (error) {
    check((error.status ?? error.statusCode) === status, `status ${error.status ?? error.statusCode}: ${error.message}`);
    return error;
  }
  throw new Error(`no ${status}`);
}

// Asks until the limit on calls is reached.
export async function untilLimited(ask) {
  for (let call = 0; call < MAX_LIMITED_CALLS; call++) {
    try {
      await ask();
    } catch (error) {
      check((error.status ?? error.statusCode) === 429, error.message);
      return;
    }
  }
  throw new Error(`no 429 in ${MAX_LIMITED_CALLS} calls`);
}

export async function run(features) {
  for (const [feature, use] of Object.entries(features)) await say(feature, use);
}

export async function runAtOnce(features) {
  await Promise.all(Object.entries(features).map(([feature, use]) => say(feature, use)));
}

async function say(feature, use) {
  let outcome = { ok: true, detail: "" };
  try {
    await use();
  } catch (error) {
    outcome = { ok: false, detail: `${error?.name}: ${error?.message}`.slice(0, 2000) };
  }
  console.log(JSON.stringify({ feature, ...outcome, ended_unix_s: Date.now() / 1000 }));
}
