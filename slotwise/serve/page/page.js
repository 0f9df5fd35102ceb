// The page: a conversation, and where the time to each answer's first token went.
// No libraries; everything it shows comes from this server.

const $ = (id) => document.getElementById(id);
const element = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};

const KINDS = [
  [/^queue$|^emit$/, "wait"],
  [/^template$|^tokenize$/, "text"],
  [/^lookup$|^restore$|^checkpoint$|^lend$|^refill$/, "memory"],
  [/^read\.|^draft$/, "read"],
  [/^first_window$|^sample$/, "window"],
];
const kindOf = (phase) => (KINDS.find(([pattern]) => pattern.test(phase)) || [0, "other"])[1];
const milliseconds = (ns) => (ns / 1e6).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const share = (part) => (100 * part).toFixed(1) + " %";
const count = (number) => (number ?? 0).toLocaleString("en");

let messages = [];
let loading = false;
let running = null; // AbortController of the answer that is being made
let shown = null; // the button of the answer whose times are shown

// -- the server ---------------------------------------------------------------------------

const key = () => sessionStorage.getItem("key") || "";
const headers = () => ({ "content-type": "application/json", ...(key() ? { authorization: `Bearer ${key()}` } : {}) });

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  if (response.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
  const problem = await response.json().catch(() => null);
  throw new Error(problem?.error?.message || `${response.status} ${response.statusText}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function lookAround() {
  try {
    const response = await fetch("health");
    const state = await response.json();
    loading = state.state === "loading";
    $("dot").dataset.state = state.state || "loading";
    $("model-name").textContent = `${state.model || ""} · ${state.state || "loading"}` + (state.waiting ? ` · ${state.waiting} waiting` : "");
  } catch {
    $("dot").dataset.state = "gone";
    $("model-name").textContent = "the server does not answer";
  }
}

async function untilLoaded(signal) {
  while (loading && !signal.aborted) {
    await new Promise((done) => setTimeout(done, 300));
    await lookAround();
  }
}

// -- the pool -----------------------------------------------------------------------------

function showPool(slots, rate) {
  const total = Object.values(slots || {}).reduce((a, b) => a + b, 0);
  $("pool").hidden = !total;
  if (!total) return;
  $("pool-bar").replaceChildren(
    ...["resident", "loading", "lent", "free"].map((state) => {
      const part = element("i", state);
      part.style.width = `${(100 * (slots[state] || 0)) / total}%`;
      return part;
    }),
  );
  const hits = rate === undefined || rate === null ? "" : ` · hit rate ${share(rate)}`;
  const text = `${count(slots.resident)} of ${count(total)} expert slots filled, ${count(slots.lent)} lent, ${count(slots.free)} empty${hits}`;
  $("pool-text").textContent = text;
  $("pool-bar").setAttribute("aria-label", text);
}

async function lookAtPool() {
  try {
    const text = await (await ask("metrics")).text();
    const value = (name) => Number((text.match(new RegExp(`^slotwise:${name} ([0-9.e+-]+)`, "m")) || [0, 0])[1]);
    const state = (name) => value(`expert_slots\\{state="${name}"\\}`);
    const hits = value("expert_hits_total"), misses = value("expert_misses_total");
    const slots = Object.fromEntries(["resident", "loading", "lent", "free"].map((name) => [name, state(name)]));
    showPool(slots, hits + misses ? hits / (hits + misses) : null);
  } catch {
    /* the next look may do better */
  }
}

// -- the waterfall ------------------------------------------------------------------------

function bar(kind, from, width) {
  const cell = element("td", `track ${kind}`);
  const track = element("div");
  const part = element("i");
  part.style.left = `${Math.min(99.5, 100 * from)}%`;
  part.style.width = `${100 * width}%`;
  track.append(part);
  cell.append(track);
  return cell;
}

function showPhases(phases, wall) {
  let at = 0;
  const rows = Object.entries(phases).map(([name, ns]) => {
    const row = element("tr");
    row.dataset.phase = name;
    row.dataset.ns = ns;
    const head = element("th", "", name);
    head.scope = "row";
    row.append(head, bar(kindOf(name), wall ? at / wall : 0, wall ? ns / wall : 0));
    row.append(element("td", "number", milliseconds(ns)), element("td", "number", wall ? share(ns / wall) : ""));
    at += ns;
    return row;
  });
  $("phases").replaceChildren(...rows);
  $("sum").textContent = milliseconds(at);
  $("sum").dataset.ns = at;
  $("sum-share").textContent = wall ? share(at / wall) : "";
  return at;
}

function showProgress(chunk) {
  const progress = chunk.prompt_progress, more = chunk.slotwise_progress;
  const at = showPhases(more.phases_ns, Object.values(more.phases_ns).reduce((a, b) => a + b, 0));
  $("title").textContent = `Reading the prompt: ${milliseconds(at)} ms so far`;
  $("subtitle").textContent = `${count(progress.processed)} of ${count(progress.total)} tokens, ${share(more.share)} of the read; ${count(progress.cache)} reused`;
  $("check").textContent = "";
  $("lanes-part").hidden = true;
  $("facts").replaceChildren();
  showPool(more.expert_slots);
}

function showLedger(ledger) {
  const phases = Object.fromEntries(Object.entries(ledger.phases).map(([name, phase]) => [name, phase.ns]));
  const at = showPhases(phases, ledger.wall_ns);
  $("waterfall").dataset.wall = ledger.wall_ns;
  const right = at === ledger.wall_ns && ledger.counted_twice_ns === 0;
  $("check").className = right ? "" : "wrong";
  $("check").textContent = right ? "= wall time, measured apart" : `≠ wall time ${milliseconds(ledger.wall_ns)} ms`;
  $("title").textContent =
    ledger.status === "done" ? `Time to the first token: ${milliseconds(ledger.wall_ns)} ms` : `${ledger.status} after ${milliseconds(ledger.wall_ns)} ms`;
}

function showRecord(record) {
  showLedger(record.ledger);
  const t = record.tokens;
  $("subtitle").textContent = `${count(t.prompt)} prompt tokens = ${count(t.reused)} reused + ${count(t.read)} read + 1 in the first window`;
  const lanes = Object.entries(record.lanes);
  $("lanes-part").hidden = !lanes.length;
  $("lanes").replaceChildren(
    ...lanes.map(([name, lane]) => {
      const row = element("tr");
      row.append(element("th", "", name), bar("lane", 0, Math.min(1, lane.busy_ns / record.ledger.wall_ns)));
      row.append(element("td", "number", `${milliseconds(lane.busy_ns)} ms`), element("td", "number", `${(lane.bytes / 2 ** 20).toFixed(1)} MiB`));
      return row;
    }),
  );
  $("facts").replaceChildren(...facts(record).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

function facts(record) {
  const list = [];
  const { conversation, loan, refill, decode } = record;
  if (conversation && conversation.mode !== "off") {
    const found = conversation.matched ? `${count(conversation.matched)} tokens known` : "nothing known";
    const from = conversation.restored_bytes ? `, ${(conversation.restored_bytes / 2 ** 20).toFixed(1)} MiB put back` : "";
    list.push(["conversation", `${conversation.mode}: ${found}${from}`]);
  }
  if (loan) list.push(["expert slots lent", `${count(loan.slots)} to the prompt read`]);
  if (loan) list.push(["of them empty", `${count(Math.max(0, loan.slots - (refill?.slots || 0)))} when the answer ended`]);
  if (refill) list.push(["refill", `${refill.policy}: ${count(refill.slots)} filled, the request waited ${milliseconds(refill.waited_ns)} ms`]);
  const rate = hitRate(record.decode_experts);
  if (rate !== null) list.push(["decode's experts", `${share(rate)} were in an expert slot`]);
  const read = hitRate(record.prefill_experts);
  if (read !== null) list.push(["read's experts", `${share(read)} were in an expert slot`]);
  if (decode && decode.wall_ns) list.push(["after the first token", `${count(decode.tokens)} tokens, ${(decode.tokens / (decode.wall_ns / 1e9)).toFixed(1)} a second`]);
  list.push(["request", record.request]);
  return list;
}

const hitRate = (experts) => {
  const all = (experts?.hits || 0) + (experts?.misses || 0);
  return all ? experts.hits / all : null;
};

// -- the conversation ---------------------------------------------------------------------

function say(role, text) {
  $("empty")?.remove();
  const said = element("div", `said ${role}`, text);
  $("log").append(said);
  $("log").scrollTop = $("log").scrollHeight;
  return said;
}

function addAbout(said, record) {
  const first = record.ledger.status === "done" ? `${milliseconds(record.ledger.wall_ns)} ms to the first token` : record.status;
  const button = element("button", "about", `${first} · ${count(record.tokens.generated)} tokens`);
  button.type = "button";
  button.addEventListener("click", () => select(button, record));
  said.after(button);
  select(button, record);
  $("log").scrollTop = $("log").scrollHeight;
}

function select(button, record) {
  shown?.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  shown = button;
  showRecord(record);
}

function follow(chunk, said) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.prompt_progress) showProgress(chunk);
  if (chunk.slotwise_ledger) showLedger(chunk.slotwise_ledger);
  const piece = chunk.choices?.[0]?.delta?.content;
  if (piece) said.textContent += piece;
  if (chunk.slotwise) addAbout(said, chunk.slotwise.record);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function answer() {
  const said = say("assistant", "");
  running = new AbortController();
  busy(true);
  try {
    const body = JSON.stringify({
      messages,
      stream: true,
      return_progress: true,
      temperature: Number($("temperature").value),
      max_tokens: Number($("max-tokens").value) || 256,
    });
    await untilLoaded(running.signal);
    const response = await ask("v1/chat/completions", { method: "POST", body, signal: running.signal });
    for await (const chunk of events(response)) follow(chunk, said);
  } catch (problem) {
    said.classList.add("failed");
    const note = problem.name === "AbortError" ? " (stopped)" : `\n${problem.message}`;
    said.append(element("span", "problem", note));
  } finally {
    const content = said.firstChild?.nodeType === 3 ? said.firstChild.data : "";
    if (content.trim()) messages.push({ role: "assistant", content });
    else messages.pop(); // a question without an answer is no part of what comes next
    running = null;
    busy(false);
    lookAround();
    lookAtPool();
  }
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("new").disabled = is;
  if (!is) $("text").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  say("user", text);
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  $("text").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("key-form").hidden = true;
  lookAtPool();
  $("text").focus();
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});

const theme = localStorage.getItem("theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
lookAround();
lookAtPool();
setInterval(lookAround, 3000);
