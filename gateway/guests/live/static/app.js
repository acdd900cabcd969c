// Shows the gateway's stream of events, /admin/live, and of all workers and gateways /admin/status and, for the calls that
// somebody opens, /admin/receipts. All text comes in by textContent.

const COLOURS = 12;
const MOST_ROWS = 40; // calls that are remembered and shown
const MOST_RUNNING = 4; // of them, those that have not ended
const MOST_BUFFER = 4e6; // characters of an event that has not ended
const SILENCE_MS = 6000; // events come twice a second: a stream that says nothing for so long is broken
const STATUS_MS = 2000; // between two looks at the status
const MOST_TENANTS = 10; // shown
const MOST_WORST = 10; // calls that waited longest, or were latest
const MOST_OF_PROGRAM = 100; // calls: the newest
const ASKED_MS = 5000; // between two looks at the receipts of a program
const STILL_MS = 30_000; // rows stand still for so long after the last sign of somebody who chooses one
const STORED = "plait-admin-key";

const by = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Sets what differs, so that the browser lays out nothing that stays the same.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

function setWidth(node, share) {
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  if (node.style.width !== width) node.style.width = width;
}

// As many children as there are items, each made once.
function sized(parent, count, make) {
  while (parent.childElementCount > count) parent.lastElementChild.remove();
  while (parent.childElementCount < count) parent.append(make());
  return parent.children;
}

const seconds = (value) =>
  value == null ? "–" : value < 0.9995 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
const duration = (value) => (value < 120 ? `${Math.round(value)} s` : value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`);
const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);
const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
const tokens = (value) => (value < 10_000 ? number.format(value) : `${(value / 1000).toFixed(1)}k`);

// Each prefix keeps its colour and its place while it is shown.
const places = [];

function place(prefixes) {
  const ids = new Set(prefixes.map((prefix) => prefix.id));
  for (let i = 0; i < places.length; i++) if (!ids.has(places[i])) places[i] = null;
  for (const id of ids) {
    if (places.includes(id)) continue;
    const free = places.indexOf(null);
    if (free >= 0) places[free] = id;
    else places.push(id);
  }
  return [...prefixes].sort((one, other) => places.indexOf(one.id) - places.indexOf(other.id));
}

const colour = (id) => (places.includes(id) ? `c${places.indexOf(id) % COLOURS}` : "");

function newEngine() {
  const part = (text) => element("div", "", element("dt", "", text), element("dd", ""));
  return element(
    "li", "",
    element("h3", "", element("span", ""), element("span", "health")),
    element("div", "bar"),
    element("p", "kv", element("span", ""), element("span", "")),
    element("p", "why"),
    element("dl", "queue", part("running"), part("waiting"), part("queued"), part("to compute")),
    element("ol", "ranks"),
  );
}

// The engines, of which NAME@0 to NAME@N are the data-parallel ranks of one address: an item with their sums.
function addressesOf(engines) {
  return [...Map.groupBy(engines, (engine) => engine.name.replace(/@\d+$/, ""))].map(([name, ranks]) => {
    const found = { ...ranks[0], name, ranks: name === ranks[0].name ? [] : ranks };
    for (const field in found) if (Number.isFinite(found[field])) found[field] = sum(ranks, (rank) => rank[field]);
    return found;
  });
}

function showEngine(item, engine, prefixes) {
  const [title, bar, kv, why, queue, list] = item.children;
  const { ranks = [] } = engine, all = ranks.length ? ranks : [engine];
  const odd = all.map(stateOf).filter((state) => state !== "up"), part = odd.length % all.length;
  const count = ranks.length ? `${part ? `${part} of ` : ""}${ranks.length} ranks ` : "";
  setText(title.children[0], engine.name);
  setText(title.children[1], count + (odd[0] ?? "up"));
  setClass(title.children[1], odd.length ? "health odd" : "health");
  const share = (prefix) => sum(all, (one) => prefix.engines[one.name] ?? 0);
  sized(list, ranks.length, newEngine);
  if (ranks.length && list.tabIndex) Object.assign(list, { tabIndex: 0, ariaLabel: `Ranks of ${engine.name}` });
  ranks.forEach((rank, i) => showEngine(list.children[i], rank, prefixes));
  const size = engine.kv_tokens || Math.max(1, engine.cached_tokens);
  const used = engine.kv_used_tokens ?? engine.cached_tokens;
  const held = prefixes.filter((prefix) => share(prefix) > 0);
  const parts = sized(bar, held.length + 1, () => element("i", ""));
  let rest = used;
  held.forEach((prefix, i) => {
    const taken = Math.min(rest, prefix.tokens * share(prefix));
    rest -= taken;
    setClass(parts[i], colour(prefix.id));
    setWidth(parts[i], taken / size);
    parts[i].title = `prefix ${prefix.id}`;
  });
  const last = parts[held.length];
  setClass(last, "");
  setWidth(last, rest / size);
  last.title = "other tokens";
  bar.setAttribute("role", "img");
  const use = engine.kv_tokens ? `KV ${percent(used / size)} of ${tokens(engine.kv_tokens)}` : "KV size not known";
  bar.setAttribute("aria-label", use);
  setText(kv.children[0], use);
  setText(kv.children[1], `${tokens(engine.cached_tokens)} cached, ${engine.knowledge}`);
  setText(why, states.get(engine.name)?.reason ?? "");
  const figures = [engine.running_calls, engine.waiting_calls, engine.queued_calls, engine.outstanding_tokens];
  figures.forEach((figure, i) => {
    setText(queue.children[i].lastElementChild, figure < 1000 ? String(figure) : `${(figure / 1000).toFixed(1)}k`);
    setClass(queue.children[i], i && i < 3 && figure ? "some" : "");
  });
}

// What keeps an engine from calls, in all workers and gateways, why and since when.
function stateOf(engine) {
  const { state, cause, since } = states.get(engine.name) ?? { state: engine.draining ? "draining" : engine.health };
  if (state === "up") return engine.stalled ? "stalled" : state;
  return `${state}${cause ? ` (${cause})` : ""}${since ? `, since ${ago(since)}` : ""}`;
}

function newPrefix(engines) {
  const cells = engines.map(() => element("td", "", element("span", "cell", element("i", ""))));
  return element(
    "tr", "",
    element("td", "hash", element("span", "swatch"), element("span", "")),
    element("td", "number"), element("td", "number"), ...cells,
  );
}

let heads = "";

function showPrefixes(prefixes, engines) {
  const table = by("prefixes"), body = table.tBodies[0];
  const names = engines.slice(0, 8).map((engine) => engine.name);
  if (heads !== names.join("\n")) {
    heads = names.join("\n");
    const head = (text, className) => Object.assign(element("th", className, text), { scope: "col" });
    by("prefix-head").replaceChildren(
      head("id"), head("tokens", "number"), head("calls / min", "number"), ...names.map((name) => head(name)),
    );
    body.replaceChildren();
  }
  const rows = sized(body, prefixes.length, () => newPrefix(names));
  prefixes.forEach((prefix, i) => {
    const cells = rows[i].children;
    setClass(rows[i], colour(prefix.id));
    setText(cells[0].lastElementChild, prefix.id);
    setText(cells[1], tokens(prefix.tokens));
    setText(cells[2], prefix.uses.toFixed(prefix.uses < 9.95 ? 1 : 0));
    names.forEach((name, j) => {
      const share = prefix.engines[name] ?? 0;
      setWidth(cells[3 + j].firstElementChild.firstElementChild, share);
      cells[3 + j].title = `${percent(share)} on ${name}`;
    });
  });
}

function newProblem() {
  return element("li", "", element("strong"), " ", element("span"), " ", element("small"));
}

function showProblems(problems) {
  by("problem-section").hidden = !problems.length;
  const items = sized(by("problems"), problems.length, newProblem);
  problems.forEach((problem, i) => {
    const [code, sentence, since] = items[i].children;
    setText(code, `${problem.code} ${problem.about}`);
    setText(sentence, problem.sentence);
    setText(since, `since ${ago(problem.since)}`);
  });
}

function newTenant() {
  return element("tr", "", element("td"), ...Array.from({ length: 6 }, () => element("td", "number")));
}

function showTenants(tenants) {
  by("tenant-section").hidden = !tenants.length;
  const calls = (tenant) => tenant.answered_calls + tenant.failed_calls;
  const busiest = [...tenants].sort((one, other) => other.waiting_calls - one.waiting_calls || calls(other) - calls(one));
  const rows = sized(by("tenants").tBodies[0], Math.min(MOST_TENANTS, tenants.length), newTenant);
  busiest.slice(0, MOST_TENANTS).forEach((tenant, i) => {
    const figures = [
      tenant.weight, tenant.waiting_calls, tenant.answered_calls, tenant.failed_calls, tenant.prompt_tokens,
      tenant.output_tokens,
    ];
    [tenant.name, ...figures.map(number.format)].forEach((text, j) => setText(rows[i].children[j], text));
    setClass(rows[i].children[4], tenant.failed_calls ? "number failed" : "number");
  });
  const more = tenants.length - MOST_TENANTS;
  setText(by("tenant_count"), `since the start${more > 0 ? `, and ${more} more` : ""}`);
}

function showHeld(held) {
  by("held-section").hidden = !held.length;
  const rows = sized(by("held").tBodies[0], held.length, () =>
    element("tr", "", element("td"), element("td"), ...Array.from({ length: 4 }, () => element("td", "number"))));
  held.forEach((turn, i) => {
    const texts = [
      turn.model, turn.tenant, tokens(turn.tokens), duration(turn.held_s), `${turn.place}, in ${duration(turn.expected_s)}`,
      `${tokens(turn.live_tokens)} of ${turn.kv_tokens == null ? "–" : tokens(turn.kv_tokens)}`,
    ];
    texts.forEach((text, j) => setText(rows[i].children[j], text));
  });
}

let states = new Map(), now = Date.now() / 1000; // rows of engines by name; the gateway's clock

const ago = (since) => duration(Math.max(0, now - since));

function showStatus(status) {
  states = new Map(status.engines.map((engine) => [engine.name, engine]));
  showProblems(status.problems);
  showTenants(status.tenants);
}

function showFleet(fleet) {
  now = fleet.at;
  setText(by("calls_per_s"), fleet.calls_per_s.toFixed(1));
  setText(by("hit_rate"), percent(fleet.hit_rate));
  setText(by("ttft_s"), seconds(fleet.ttft_s));
  setText(by("output_tokens_per_s"), tokens(Math.round(fleet.output_tokens_per_s)));
  setText(by("in_engines"), number.format(sum(fleet.engines, (engine) => engine.running_calls + engine.waiting_calls)));
  setText(by("waiting_calls"), number.format(sum(fleet.models, (model) => model.waiting_calls)));
  const live = sum(fleet.models, (model) => model.live_sessions);
  setText(by("sessions"), `${number.format(live)} / ${number.format(sum(fleet.models, (model) => model.held_sessions))}`);
  const more = fleet.engine_count - fleet.engines.length;
  setText(by("engine_count"), more ? `and ${more} more` : "bars: the KV cache, coloured by prefix");
  const prefixes = place(fleet.prefixes);
  const addresses = addressesOf(fleet.engines), items = sized(by("engines"), addresses.length, newEngine);
  addresses.forEach((address, i) => showEngine(items[i], address, prefixes));
  showPrefixes(prefixes, fleet.engines);
  showHeld(fleet.held);
  by("views").hidden = !fleet.keeps_receipts;
  by("no_receipts").hidden = fleet.keeps_receipts;
}

const running = new Map(), ended = new Map(); // by number, the latest last

function keep(news) {
  for (const call of news.calls) {
    running.delete(call.number);
    if (call.state !== "ended") {
      running.set(call.number, call);
    } else if (!ended.has(call.number)) {
      ended.set(call.number, call);
    }
  }
  for (const map of [running, ended]) for (const key of map.keys()) if (map.size > MOST_ROWS) map.delete(key);
}

const time = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

function newCall() {
  const row = element("tr", "");
  for (let i = 0; i < 12; i++) row.append(element("td", [6, 8, 9, 10].includes(i) ? "number" : ""));
  row.children[0].append(element("button", ""));
  row.children[1].append(element("span", "swatch"), element("span", ""));
  row.children[1].className = "hash";
  row.children[7].append(element("span", "share", element("i", "")), element("span", ""));
  return row;
}

function showCall(row, call) {
  const cells = row.children, isEnded = call.state === "ended";
  const share = call.cached_tokens == null ? null : Math.min(1, call.cached_tokens / Math.max(1, call.prompt_tokens));
  row.call = call;
  cells[0].firstElementChild.disabled = !call.id;
  setText(cells[0].firstElementChild, time.format(1000 * call.at));
  setClass(row, !isEnded ? "running" : call.outcome === "ok" ? "" : "failed");
  const texts = {
    2: call.model, 3: call.tenant, 4: call.engine ?? "–", 5: call.reason ?? "–",
    6: number.format(call.prompt_tokens), 8: `${seconds(call.waited_s)} ${call.waited_for ?? ""}`.trim(), 9: seconds(call.ttft_s) + (call.late_s > 0 ? `, ${seconds(call.late_s)} late` : ""), 10: seconds(call.e2e_s),
    11: isEnded ? `${call.outcome} ${call.status}` : "running",
  };
  for (const [i, text] of Object.entries(texts)) setText(cells[i], text);
  setClass(cells[1].firstElementChild, `swatch ${colour(call.prefix)}`);
  setText(cells[1].lastElementChild, call.prefix ?? "–");
  setWidth(cells[7].firstElementChild.firstElementChild, share ?? 0);
  setText(cells[7].lastElementChild, percent(share));
}

function showRows(calls) {
  by("calls").classList.toggle("no-tenants", !calls.some((call) => call.tenant));
  const rows = sized(by("calls").tBodies[0], calls.length, newCall);
  calls.forEach((call, i) => showCall(rows[i], call));
}

function showCalls(news) {
  keep(news);
  if (by("opened").open) {
    if (shown) followProgram(news.calls);
    const end = open.state !== "ended" && [...ended.values()].find((call) => call.id === open.id);
    if (end) openCall(end);
    return;
  }
  if (view) return;
  if (by("calls").matches(":hover, :focus-within") && Date.now() - chose < STILL_MS) {
    return setText(by("left_out"), "still, while you choose one");
  }
  const newest = (map, most) => [...map.values()].reverse().slice(0, most);
  const calls = [...newest(running, MOST_RUNNING), ...newest(ended, MOST_ROWS)].slice(0, MOST_ROWS);
  showRows(calls);
  setText(by("left_out"), news.left_out ? `and ${news.left_out} more that have just ended` : "");
}

// A call that is opened, and the calls that waited longest or were latest, of all workers and gateways.

let headers = {}; // with the key
let open = null; // the call that was opened last
const program = new Map(); // the calls of its program, by id
let view = ""; // of the table of calls: "", "wait" or "late"
let chose = 0; // when somebody last pointed at a row, or moved the focus there

async function answerOf(path) {
  const answer = await fetch(path, { headers, cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error.message);
  return said;
}

function showOpen(call, lines, expected = {}) {
  const but = (value, shown) => (value == null ? "" : ` (${shown(value)} expected)`);
  const figures = {
    cached: `${call.cached_tokens == null ? "–" : number.format(call.cached_tokens)}${but(expected.cached, number.format)} of ${number.format(call.prompt_tokens)} tokens`,
    engine: `${call.engine ?? "–"} ${call.reason ?? ""}`, waited: seconds(call.waited_s), TTFT: seconds(call.ttft_s) + but(expected.first_s, seconds), E2E: seconds(call.e2e_s),
  };
  by("facts").replaceChildren(...Object.entries(figures).map(([name, text]) =>
    element("div", "", element("dt", "", name), element("dd", "", text))));
  by("sentences").replaceChildren(...lines.map((line) => element("li", "", line)));
}

// Shows what the row has until the receipt is there. A row that stood still may be of a call that has ended since.
async function openCall(call) {
  open = call;
  setText(by("opened-title"), `${call.model || "Call"} at ${time.format(1000 * call.at)}`);
  showOpen(call, []);
  openProgram(call);
  if (!by("opened").open) by("opened").showModal();
  const show = await answerOf(`receipts/${encodeURIComponent(call.id)}`).then((receipt) => () => {
    const expected = { cached: receipt.attempts.at(-1)?.predicted_cached_tokens, first_s: receipt.expected_first_token_s };
    showOpen(rowOf(receipt), receipt.sentences ?? ["Another version of the gateway keeps its receipt: plait explain tells it."], expected);
  }, ({ message }) => () => showOpen(call, [call.state === "ended" ? message : "It has not ended. Its receipt comes at its end."]));
  if (open === call) show();
}

// The program of the open call: the calls that the stream tells of, and by their receipts those that have ended before
// or elsewhere. What comes last of a call counts: one that failed may have been delivered again.
let shown = "", asked = 0; // whose calls are in `program`, and when for their receipts was asked

function openProgram(call) {
  by("program-section").hidden = true;
  if (shown !== call.program) program.clear();
  shown = call.program ?? "";
  if (!call.program) return;
  const known = [...running.values(), ...ended.values()].sort((one, other) => one.number - other.number);
  for (const row of [call, ...known]) if (row.program === shown) program.set(row.id, row);
  showProgram();
  askForProgram();
}

async function askForProgram() {
  const of = shown;
  asked = Date.now();
  const query = new URLSearchParams({ program: of, limit: MOST_OF_PROGRAM });
  const { data } = await answerOf(`receipts?${query}`).catch(() => ({ data: [] }));
  if (of !== shown) return;
  const rows = data.map(rowOf).sort((one, other) => endOf(one) - endOf(other));
  for (const row of rows) program.set(row.id, row);
  showProgram();
}

const endOf = (call) => call.at + (call.e2e_s ?? Math.max(0, now - call.at));

function newStep() {
  const item = element("li", "", element("button", ""), element("div", "", element("i", "")), element("span", ""));
  item.firstElementChild.addEventListener("click", () => openCall(item.call));
  return item;
}

// A bar for each call from its arrival to its end, and a line from the end of each that made one of its inputs.
function showProgram() {
  const sorted = [...program.values()].sort((one, other) => one.at - other.at);
  const calls = sorted.filter((call, i) => call.id === open.id || i >= sorted.length - MOST_OF_PROGRAM);
  for (const { id } of sorted) if (!calls.some((call) => call.id === id)) program.delete(id);
  by("program-section").hidden = calls.length < 2;
  const from = Math.min(...calls.map((call) => call.at)), whole = Math.max(1e-3, Math.max(...calls.map(endOf)) - from);
  const places = new Map(calls.map((call, i) => [call.id, { x: 100 * (endOf(call) - from) / whole, y: i + 0.5 }]));
  setText(by("program_count"), `${calls.length} calls, ${seconds(whole)}`);
  const [list, svg] = by("program").children, items = new Map([...list.children].map((item) => [item.call.id, item]));
  for (const [id, item] of items) if (!places.has(id)) item.remove();
  calls.forEach((call, i) => {
    const item = items.get(call.id) ?? newStep();
    item.call = call;
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
    const [button, track, said] = item.children, bar = track.firstElementChild;
    setClass(item, call.state !== "ended" ? "running" : call.outcome === "ok" ? "" : "failed");
    item.ariaCurrent = call.id === open.id ? "true" : null;
    setText(button, time.format(1000 * call.at));
    bar.style.marginLeft = `${(100 * (call.at - from)) / whole}%`;
    setWidth(bar, (endOf(call) - call.at) / whole);
    setText(said, `${call.state === "ended" ? call.outcome : "running"}, ${seconds(endOf(call) - call.at)}, ${call.engine ?? "–"}`);
  });
  const lines = calls.flatMap((call) => (call.made_by ?? []).map((id) => places.get(id)).filter(Boolean).map(
    ({ x, y }) => `M${x} ${y}L${100 * (call.at - from) / whole} ${places.get(call.id).y}`));
  svg.setAttribute("viewBox", `0 0 100 ${Math.max(1, calls.length)}`);
  svg.firstElementChild.setAttribute("d", lines.join(""));
}

// News of the program, and every few seconds the receipts of what still runs here: its end may have been left out.
function followProgram(calls) {
  for (const call of calls) if (call.program === shown) program.set(call.id, call);
  showProgram();
  const runs = [...program.values()].some((call) => call.state !== "ended");
  if (runs && Date.now() - asked > ASKED_MS) askForProgram();
}

// A receipt as a row of the table.
function rowOf(receipt) {
  const { waits, attempts } = receipt, last = attempts.at(-1);
  return {
    ...receipt, id: receipt.request_id, state: "ended", engine: last?.engine, reason: last?.placement,
    waited_s: sum(waits, (wait) => wait.for_s), ttft_s: receipt.first_token_s, late_s: receipt.late_s.first_token,
    waited_for: [...waits].sort((one, other) => other.for_s - one.for_s)[0]?.why,
  };
}

async function choose(chosen) {
  view = chosen;
  for (const button of by("views").children) button.ariaPressed = String(button.value === chosen);
  if (!chosen) return showCalls({ calls: [] });
  const [found, said] = await answerOf(`receipts?worst=${chosen}&limit=${MOST_WORST}`).then(
    ({ data }) => [data.map(rowOf).filter((call) => call[chosen === "wait" ? "waited_s" : "late_s"] > 0), ""],
    (problem) => [[], problem.message],
  );
  if (view !== chosen) return;
  showRows(found);
  setText(by("left_out"), said || (found.length ? `of the kept receipts, at ${time.format(1000 * now)}` : "none"));
}

by("views").addEventListener("click", ({ target }) => target.matches("button") && choose(target.value));
by("close").addEventListener("click", () => by("opened").close());
const rows = by("calls").tBodies[0];
for (const sign of ["pointermove", "focusin", "keydown"]) rows.addEventListener(sign, () => (chose = Date.now()));
rows.addEventListener("click", ({ target }) => {
  const { call } = target.closest("tr");
  if (call.id) openCall(call);
});
rows.addEventListener("keydown", (event) => {
  const row = event.target.closest("tr");
  const next = { ArrowUp: row.previousElementSibling, ArrowDown: row.nextElementSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  next.querySelector("button").focus();
});

// The stream.

function say(text, className = "") {
  setText(by("state"), text);
  setClass(by("state"), className);
}

function show(isLive) {
  by("live").hidden = by("figures").hidden = !isLive;
  by("ask").hidden = isLive;
}

function take(block) {
  let name = "", data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name === "fleet") showFleet(JSON.parse(data));
  if (name === "calls") showCalls(JSON.parse(data));
}

async function read(body, abort) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    const { done, value } = await reader.read().finally(() => clearTimeout(alarm));
    if (done) return;
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    blocks.forEach(take);
    if (buffer.length > MOST_BUFFER) return;
  }
}

// Looks at the status until the stream ends. A look that fails ends the stream.
async function look(abort) {
  const { signal } = abort;
  while (!signal.aborted) {
    const answer = await fetch("status", { headers, cache: "no-store", signal });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    showStatus(await answer.json());
    await new Promise((wake) => setTimeout(wake, STATUS_MS));
  }
}

function ask(why) {
  sessionStorage.removeItem(STORED);
  if (why) setText(by("why"), why);
  show(false);
  say("no key");
  by("key").focus();
}

// Watches until the key is refused; a stream that breaks is begun again.
async function watch(key) {
  for (let pause_s = 1; ; pause_s = Math.min(8, 2 * pause_s)) {
    const abort = new AbortController();
    try {
      headers = { Authorization: `Bearer ${key}` };
      const answer = await fetch("live", { headers, cache: "no-store", signal: abort.signal });
      if (answer.status === 401) return ask("The gateway does not take this key.");
      if (answer.status === 404) return ask("This gateway has no admin API here.");
      if (answer.ok) {
        sessionStorage.setItem(STORED, key);
        running.clear();
        ended.clear();
        const hadFocus = by("ask").contains(document.activeElement);
        show(true);
        if (hadFocus) by("live").focus();
        say("live", "live");
        pause_s = 0.5;
        look(abort).catch(() => abort.abort());
        await read(answer.body, abort).finally(() => abort.abort());
      }
      say(answer.ok ? "stream ended, connecting again" : `status ${answer.status}, trying again`, "broken");
    } catch {
      say("no connection, trying again", "broken");
    }
    await new Promise((wake) => setTimeout(wake, 1000 * pause_s));
  }
}

// The key of the address, /#key=..., goes out of the address and of the history.
function givenKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) history.replaceState(null, "", location.pathname + location.search);
  return key || sessionStorage.getItem(STORED);
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  watch(by("key").value.trim());
  by("key").value = "";
});

const key = givenKey();
if (key) watch(key);
else ask();
