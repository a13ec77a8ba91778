"use strict";
// The live numbers: /console/data once a second, drawn as charts, a table, a state and a banner.

const POLL_MS = 1000;
const live = { samples: [], charts: [], timer: 0, started: null, isLocked: false, failures: 0 };

const newest = (samples, of) => (samples.length ? of(samples.at(-1)) : null);

// The newest value there is, and how long ago it was.
function lastKnown(samples, of) {
  for (const sample of samples.toReversed()) {
    if (of(sample) !== null) return { value: of(sample), age: samples.at(-1).number - sample.number };
  }
  return { value: null, age: 0 };
}

function ageText(samples, of) {
  const { value, age } = lastKnown(samples, of);
  return value !== null && age > 2 ? [`${age} s ago`] : [];
}

const percent = (value) => (value === null ? "–" : NUMBER.format(value * 100));
const milliseconds = (value) => (value === null ? "–" : value < 10 ? value.toFixed(1) : WHOLE.format(value));

const CHARTS = [
  {
    title: "Generated tokens", unit: "tok/s", least: 10,
    series: [{ name: "generated", look: "accent", style: "area", of: (s) => s.generated_tokens_per_s }],
    value: (samples) => newest(samples, (s) => s.generated_tokens_per_s),
    sub: (samples) => ["prompt " + shown(newest(samples, (s) => s.prompt_tokens_per_s)) + " tok/s"],
  },
  {
    title: "Time to first token", unit: "ms", least: 10, format: milliseconds,
    series: [
      { name: "median", look: "accent", style: "line", of: (s) => s.ttft_p50_ms },
      { name: "p95", look: "amber", style: "thin", of: (s) => s.ttft_p95_ms },
    ],
    value: (samples) => lastKnown(samples, (s) => s.ttft_p50_ms).value,
    sub: (samples) => ageText(samples, (s) => s.ttft_p50_ms),
  },
  {
    title: "Rows in use", unit: "running", tipUnit: "", least: 4,
    series: [{ name: "rows", look: "accent", style: "area", of: (s) => s.num_running }],
    value: (samples) => newest(samples, (s) => s.num_running),
    sub: (samples) => ["most in 5 min: " + shown(Math.max(0, ...samples.map((s) => s.num_running)))],
  },
  {
    title: "Queue", unit: "waiting", tipUnit: "", least: 4,
    series: [{ name: "waiting", look: "amber", style: "area", of: (s) => s.num_waiting }],
    value: (samples) => newest(samples, (s) => s.num_waiting),
    sub: (samples) => ["unfinished prompt tokens " + shown(newest(samples, (s) => s.num_queued_tokens))],
  },
  {
    title: "KV pages", unit: "pages active", tipUnit: "pages", axis: (value) => (value < 1e4 ? WHOLE : COMPACT).format(value),
    top: (samples) => newest(samples, (s) => s.num_pages_active + s.num_pages_cached + s.num_pages_free),
    series: [
      { name: "active", look: "accent", style: "stack", of: (s) => s.num_pages_active },
      { name: "cached", look: "amber", style: "stack", of: (s) => s.num_pages_cached },
      { name: "free", look: "plain", style: "stack", of: (s) => s.num_pages_free },
    ],
    value: (samples) => newest(samples, (s) => s.num_pages_active),
    sub: () => [],
  },
  {
    title: "Prefix cache hits", unit: "% of prompt tokens", tipUnit: "%", format: percent,
    top: () => 1, axis: percent,
    series: [{ name: "hits", look: "blue", style: "area", of: (s) => s.cache_hit_rate }],
    value: (samples) => lastKnown(samples, (s) => s.cache_hit_rate).value,
    sub: (samples, data) => [...ageText(samples, (s) => s.cache_hit_rate), `since start ${percent(data.cache_hit_rate)} %`],
  },
];

function showState(state, text) {
  $("status").dataset.state = state;
  // The same text again would be read out again.
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

// kind "bad" or "wait"; without a text the banner goes.
function showBanner(kind, title = "", text = "") {
  const banner = $("banner");
  banner.hidden = !title;
  banner.dataset.kind = kind;
  if (banner.textContent !== title + text) banner.replaceChildren(el("strong", {}, title), el("span", {}, text));
}

function showHealth(data) {
  $("live").classList.toggle("stale", data.is_dead);
  if (data.is_dead) {
    showState("bad", "engine dead");
    showBanner("bad", "The engine is dead.", data.failure ?? "");
  } else if (data.phase !== "ready" && data.phase !== "dead" && data.failure) {
    showState("wait", data.phase);
    showBanner("wait", "Not ready yet.", [data.phase, data.phase_detail].filter(Boolean).join(": "));
  } else if (data.failure) {
    showState("bad", "not ready");
    showBanner("bad", "Requests may fail.", data.failure);
  } else if (data.is_paused) {
    showState("wait", "paused");
    showBanner("wait", "Generation is paused.", "Requests wait until POST /continue_generation.");
  } else {
    showState("good", "ready");
    showBanner("");
  }
}

function showUnreachable(error) {
  live.failures += 1;
  if (live.failures < 2) return; // one lost answer is no news
  $("live").classList.add("stale");
  showState("bad", "unreachable");
  showBanner("bad", "No answer from the server.", error.message + " Trying again every second.");
}

function takeSamples(data) {
  if (live.started !== data.started_s) live.samples = [];
  live.started = data.started_s;
  const last = live.samples.at(-1)?.number ?? 0;
  const oldest = (data.samples.at(-1)?.number ?? last) - WINDOW_SAMPLES;
  live.samples = [...live.samples, ...data.samples.filter((s) => s.number > last)].filter((s) => s.number > oldest);
}

function showFacts(data) {
  const facts = [
    ["Version", data.version],
    ["Up for", shownSeconds(Date.now() / 1000 - data.started_s)],
    ["Context", data.max_model_len === null ? "–" : WHOLE.format(data.max_model_len) + " tokens"],
    ["KV pages", WHOLE.format(data.num_pages_total)],
    ["Prompt tokens", WHOLE.format(data.num_prompt_tokens)],
    ["Generated", WHOLE.format(data.num_generated_tokens)],
    ["Steps", WHOLE.format(data.num_steps)],
    ["Step age", data.step_age_s ? shownSeconds(data.step_age_s) : "–"],
    ["Retractions", WHOLE.format(data.num_retractions)],
    ["Recompiles", WHOLE.format(data.num_recompiles)],
  ];
  if (data.num_scheduler_errors) facts.push(["Scheduler errors", WHOLE.format(data.num_scheduler_errors)]);
  if (data.device_note) facts.push(["Device", data.device_note]);
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function showModel(data) {
  chat.model = data.model;
  $("model").textContent = data.model;
  document.title = data.model + " – compiled-engine";
  const parts = [];
  if (data.tool_parser) parts.push("tool calls: " + data.tool_parser);
  if (data.reasoning_parser) parts.push("reasoning: " + data.reasoning_parser);
  $("parsers").textContent = parts.join(" · ");
}

// Rows keep their nodes, so that a selection or the scroll position survives a poll.
const tableRows = new Map();
function showRequests(data) {
  const nodes = data.requests.map((row) => {
    const key = row.id + " " + row.route;
    const known = tableRows.get(key);
    const text = JSON.stringify(row);
    if (known?.text === text) return [key, known];
    const node = known?.node ?? el("tr");
    node.className = row.id.startsWith(CONSOLE_ID) ? "mine" : "";
    node.replaceChildren(...rowCells(row));
    return [key, { node, text }];
  });
  tableRows.clear();
  nodes.forEach(([key, entry]) => tableRows.set(key, entry));
  const body = $("requests");
  const wanted = nodes.map(([, entry]) => entry.node);
  if (wanted.some((node, i) => body.children[i] !== node) || body.children.length !== wanted.length) body.replaceChildren(...wanted);
  $("requests-empty").hidden = wanted.length > 0;
  $("requests-note").textContent = wanted.length ? `${WHOLE.format(data.num_running)} unfinished; the newest ones are shown` : "";
}

// Requests of this tab are called by their number.
function shownId(id) {
  return id.startsWith(CONSOLE_ID) ? "chat " + id.slice(CONSOLE_ID.length + 1).replace("[0]", "") : id;
}

function rowCells(row) {
  const state = row.finish_reason ?? row.state;
  const number = (value) => el("td", { className: "n" }, value);
  return [
    el("td", { className: "id", title: row.id + (row.key ? "\nkey: " + row.key : "") }, shownId(row.id)),
    el("td", {}, el("span", { className: "badge", data: { state } }, state)),
    number(WHOLE.format(row.prompt_tokens)),
    number(WHOLE.format(row.cached_tokens)),
    number(WHOLE.format(row.output_tokens)),
    number(milliseconds(row.queue_ms)),
    number(milliseconds(row.ttft_ms)),
    number(shown(row.tokens_per_s)),
    number(row.age_s.toFixed(1)),
    el("td", { className: "route" }, row.route.replace(/^POST (\/v1)?\//, "")),
  ];
}

async function poll() {
  clearTimeout(live.timer);
  try {
    const since = live.samples.at(-1)?.number ?? 0;
    const data = await (await call("/console/data?since=" + since)).json();
    live.failures = 0;
    if (live.isLocked) closeKeyForm();
    live.isLocked = false;
    takeSamples(data);
    showModel(data);
    showHealth(data);
    showRequests(data);
    showFacts(data);
    live.charts.forEach((chart) => chart.update(live.samples, data));
  } catch (error) {
    if (error.status === 401) {
      locked();
      return; // until a key is given
    }
    showUnreachable(error);
  }
  // A page that nobody sees asks for nothing; the server keeps the samples it misses.
  if (!document.hidden) live.timer = setTimeout(poll, POLL_MS);
}

function locked() {
  live.isLocked = true;
  chat.model = null;
  showState("wait", "locked");
  showBanner("");
  $("model").textContent = "locked";
  openKeyForm(apiKey ? "This key is not taken." : "This server asks for an API key.");
}

function startLive() {
  live.charts = CHARTS.map((spec) => new Chart(spec));
  $("charts").append(...live.charts.map((chart) => chart.node));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !live.isLocked) poll();
  });
  poll();
}
