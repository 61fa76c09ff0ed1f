// The inspector of `outrider serve`: a prompt, its answer as a trace, and what the engine does meanwhile.
"use strict";

const at = (id) => document.getElementById(id);
const view = new TraceView({tokens: at("tokens"), rounds: at("rounds"), detail: at("detail")});
legend(at("legend"));

// ---------------------------------------------------------------------------------------------------------------
// The server: a key where it asks for one, and events as they come.
// ---------------------------------------------------------------------------------------------------------------

at("key").value = sessionStorage.getItem("key") || "";

function headers() {
  const key = at("key").value;
  return key ? {Authorization: `Bearer ${key}`} : {};
}

class Refused extends Error {}

// Calls `take` with every event of a response of server-sent events.
async function listen(path, options, take) {
  const response = await fetch(path, {...options, headers: {...headers(), ...options.headers}});
  if (!response.ok) {
    if (response.status === 401) at("key-field").hidden = false;
    let reason = response.statusText;
    try { reason = (await response.json()).error.message; } catch { /* no JSON: the status has to do */ }
    throw new Refused(`${response.status}: ${reason}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------
// The prompt and its answer.
// ---------------------------------------------------------------------------------------------------------------

let running = null;

function body() {
  const system = at("system").value.trim(), seed = at("seed").value;
  return {
    messages: [...(system ? [{role: "system", content: system}] : []), {role: "user", content: at("prompt").value}],
    temperature: Number(at("temperature").value), max_tokens: Number(at("most").value),
    ...(seed === "" ? {} : {seed: Number(seed)}),
    speculative: at("speculative").checked ? "auto" : "off",
    stream: true, stream_options: {include_usage: true}, trace: true,
  };
}

function tell(text, wrong = false) {
  at("summary").textContent = text;
  at("summary").classList.toggle("wrong", wrong);
}

async function ask() {
  if (running) running.abort();
  const mine = running = new AbortController();
  let finish = "", told = null;
  view.clear();
  tell("Waiting for the first token.");
  at("stop").disabled = false;
  at("tokens").setAttribute("aria-busy", "true");
  try {
    await listen("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body()), signal: mine.signal, headers: {"Content-Type": "application/json"},
    }, (event) => {
      if (mine !== running) return;
      if (event.error) throw new Refused(event.error.message);
      for (const choice of event.choices) {
        for (const round of choice.trace || []) view.add(round);
        finish = choice.finish_reason || finish;
      }
      if (event.metrics) told = event;
      tell(`${count(view.spans.length, "token")} in ${count(view.trace.length, "round")}\u2026`);
    });
    if (mine === running) tell(summary(finish, told));
  } catch (error) {
    if (mine !== running) return;
    if (error.name === "AbortError") tell(`Stopped after ${count(view.spans.length, "token")}.`);
    else tell(error instanceof Refused ? error.message : "The server cannot be reached.", true);
  } finally {
    if (mine === running) {
      running = null;
      at("stop").disabled = true;
      at("tokens").setAttribute("aria-busy", "false");
    }
  }
}

function summary(finish, told) {
  const tokens = view.spans.length, rounds = view.trace.length;
  const ends = {stop: "ended by itself", length: "cut at the most tokens"};
  const parts = [`${count(tokens, "token")} in ${count(rounds, "round")}`, `${(tokens / Math.max(1, rounds)).toFixed(2)} a round`, ends[finish] || finish];
  const speed = told && told.metrics.tokens_per_second;
  if (speed) parts.push(`${speed.toFixed(1)} tokens/s`);
  return `${parts.join(", ")}.`;
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").addEventListener("click", () => running && running.abort());

// ---------------------------------------------------------------------------------------------------------------
// Light and dark: as the system has it, until the button is pressed.
// ---------------------------------------------------------------------------------------------------------------

const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { at("theme").textContent = dark() ? "Light" : "Dark"; };
at("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; nameTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

// ---------------------------------------------------------------------------------------------------------------
// The live panel. An event has the counts of half a second (docs/serving.md, "The inspector").
// ---------------------------------------------------------------------------------------------------------------

const SPACE = "http://www.w3.org/2000/svg";
const KEPT = 120, RECENT = 4;  // events: a minute, and two seconds
const live = {events: [], reached: [], accepted: [], drafts: [0, 0, 0], points: [], cost: null, slots: 0};

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const picture = (width, height, label, ...children) => draw("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, ...children);
const total = (events, name) => events.reduce((sum, event) => sum + event[name], 0);
const figure = (name, value) => make("div", {}, make("dt", {text: name}), make("dd", {text: value}));
const number = (value, digits = 1) => Number.isFinite(value) ? value.toFixed(digits) : "\u2013";

function take(event) {
  live.events.push(event);
  live.events.splice(0, live.events.length - KEPT);
  ["reached", "accepted"].forEach((name) => event[`${name}_at`].forEach((n, k) => { live[name][k] = (live[name][k] || 0) + n; }));
  ["drafted", "verified", "accepted"].forEach((name, i) => { live.drafts[i] += event[name]; });
  live.points = [...live.points, ...event.points].slice(-80);
  live.cost = event.cost || live.cost;
  if (!document.hidden) render();
}

function render() {
  const last = live.events.at(-1), recent = live.events.slice(-RECENT);
  const decoding = live.events.filter((event) => event.tokens), busy = decoding.slice(-RECENT);
  const rates = live.events.map((event) => event.tokens / event.seconds);
  const all = total(recent, "tokens") / total(recent, "seconds");
  at("rates").replaceChildren(
    make("dl", {class: "figures"},
      figure("tokens/s, all users", number(all)),
      figure("tokens/s per user", number(total(busy, "tokens") / total(busy, "request_seconds"))),
      figure("accepted length", number(total(decoding, "tokens") / total(decoding, "rounds"), 2)),
      figure("decoding", `${last.running}\u2009/\u2009${last.max_requests}`),
      figure("in the queue", `${last.waiting}`),
      figure("KV blocks used", percent(last.kv_usage))),
    rateHistory(rates),
  );
  at("positions").replaceChildren(positions());
  at("drafts").replaceChildren(funnel(), make("p", {class: "note", text: "Since this page was opened. Drafted: proposed by drafter or copy. Verified: admitted by the schedule to the target's forward."}));
  at("cost").replaceChildren(cost());
}

function rateHistory(rates) {
  const width = 300, height = 70, top = Math.max(10, ...rates), left = width - 2.5 * (rates.length - 1);
  const points = rates.map((rate, i) => `${(left + 2.5 * i).toFixed(1)},${(height - 14 - (height - 26) * rate / top).toFixed(1)}`);
  return picture(width, height, `tokens per second over the last minute, ${number(top, 0)} at most`,
    draw("polygon", {class: "area", points: [`${left},${height - 14}`, ...points, `${width},${height - 14}`].join(" ")}),
    draw("polyline", {class: "curve", points: points.join(" ")}),
    draw("line", {class: "axis", x1: 0, x2: width, y1: height - 14, y2: height - 14}),
    draw("text", {x: 0, y: height - 2, text: "a minute ago"}), draw("text", {x: width, y: height - 2, "text-anchor": "end", text: "now"}),
    draw("text", {x: 0, y: 9, text: `${number(top, 0)} tokens/s`}));
}

function positions() {
  const shares = live.reached.map((n, k) => n ? live.accepted[k] / n : null);
  while (shares.length && shares.at(-1) === null) shares.pop();
  if (!shares.length) return make("p", {class: "note", text: live.slots ? "No drafts have been verified yet." : "This server drafts nothing."});
  const width = 300, row = 17, height = row * shares.length + 16;
  const bars = shares.flatMap((share, k) => [
    draw("text", {x: 0, y: row * k + 12, text: `${k + 1}`}),
    draw("rect", {class: "frame", x: 20, y: row * k + 2, width: 190, height: row - 5, rx: 2}),
    draw("rect", {class: "accepted", x: 20, y: row * k + 2, width: 190 * (share || 0), height: row - 5, rx: 2}),
    draw("text", {class: "strong", x: 216, y: row * k + 12, text: percent(share)}),
    draw("text", {x: width, y: row * k + 12, "text-anchor": "end", text: `${live.reached[k]}`}),
  ]);
  const label = `accepted of those reached: ${shares.map((share, k) => `position ${k + 1} ${percent(share)}`).join(", ")}`;
  return picture(width, height, label, ...bars,
    draw("text", {x: 0, y: height - 2, text: "draft, accepted where reached"}), draw("text", {x: width, y: height - 2, "text-anchor": "end", text: "tried"}));
}

function funnel() {
  const width = 300, row = 34, most = Math.max(1, live.drafts[0]);
  const bars = ["drafted", "verified", "accepted"].flatMap((name, i) => {
    const before = i ? live.drafts[i - 1] : 0;
    const share = before ? `, ${percent(live.drafts[i] / before)} of those ${i === 1 ? "drafted" : "verified"}` : "";
    return [
      draw("text", {class: "strong", x: 0, y: row * i + 11, text: `${name} ${live.drafts[i]}${share}`}),
      draw("rect", {class: i === 0 ? "frame" : i === 1 ? "verified" : "accepted", x: 0.5, y: row * i + 15, width: Math.max(1, (width - 1) * live.drafts[i] / most), height: 12, rx: 2}),
    ];
  });
  return picture(width, 3 * row, `drafted ${live.drafts[0]}, verified ${live.drafts[1]}, accepted ${live.drafts[2]}`, ...bars);
}

function cost() {
  const curve = live.cost ? live.cost.rows.map((rows, i) => [rows, live.cost.seconds[i]]) : [];
  const everything = [...curve, ...live.points];
  if (!everything.length) return make("p", {class: "note", text: "No step has been taken yet."});
  const width = 300, height = 170, left = 34, bottom = height - 30;
  const widest = Math.max(...everything.map(([rows]) => rows)) + 1;
  const longest = 1.1 * Math.max(...(curve.length ? curve : live.points).map(([, s]) => s), ...quantile(live.points.map(([, s]) => s), 0.9));
  const x = (rows) => left + (width - left) * rows / widest, y = (s) => Math.max(4, bottom - (bottom - 8) * s / longest);
  const recent = live.points.slice(-8), mean = (i) => recent.reduce((sum, point) => sum + point[i], 0) / recent.length;
  const parts = [
    draw("polyline", {class: "axis", points: `${left},4 ${left},${bottom} ${width},${bottom}`}),
    ...ticks(1000 * longest).map((ms) => draw("text", {x: left - 4, y: y(ms / 1000) + 4, "text-anchor": "end", text: `${ms}`})),
    draw("text", {x: left + 5, y: 11, text: "ms a step"}),
    ...[...new Set([1, Math.round(widest / 2), widest - 1])].map((rows) => draw("text", {x: x(rows), y: bottom + 13, "text-anchor": "middle", text: `${rows}`})),
    draw("text", {x: width, y: height - 3, "text-anchor": "end", text: "rows of the target's forward"}),
    ...live.points.map(([rows, s]) => draw("circle", {class: "step", cx: x(rows), cy: y(s), r: 2})),
  ];
  if (curve.length) {
    parts.push(draw("polyline", {class: "curve", points: curve.map(([rows, s]) => `${x(rows).toFixed(1)},${y(s).toFixed(1)}`).join(" ")}));
  }
  let label = "milliseconds of a step by rows of the forward";
  if (recent.length) {
    const [rows, s] = [mean(0), mean(1)];
    label = `the last steps: ${number(rows)} rows, ${number(1000 * s, 0)} milliseconds`;
    parts.push(draw("circle", {class: "point", cx: x(rows), cy: y(s), r: 6}),
      draw("text", {class: "strong", x: x(rows) + (x(rows) > 150 ? -9 : 9), y: Math.min(y(s) + 20, bottom - 4), "text-anchor": x(rows) > 150 ? "end" : "start", text: `now ${number(rows)} rows, ${number(1000 * s, 0)} ms`}));
  }
  const source = live.cost ? `Line: what the schedule reckons for ${count(live.cost.requests, "user")}. ` : "The policy reckons no costs. ";
  return make("div", {}, picture(width, height, label, ...parts), make("p", {class: "note", text: `${source}Dots: measured steps.`}));
}

// Two to five round numbers up to the largest.
function ticks(largest) {
  const power = 10 ** Math.floor(Math.log10(largest));
  const step = [0.2, 0.5, 1, 2].map((one) => one * power).find((one) => largest / one < 5.5);
  return Array.from({length: Math.floor(largest / step)}, (_, i) => Number(((i + 1) * step).toPrecision(2)));
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? [sorted[Math.floor(share * (sorted.length - 1))]] : [];
}

function begin(about) {
  const drafts = about.most_drafts ? `up to ${about.most_drafts} drafts, ${about.policy}` : "plain decoding";
  at("model").textContent = `${about.model} \u00b7 ${drafts} \u00b7 ${about.version}`;
  at("speculative").disabled = !about.most_drafts;
  live.slots = about.most_drafts;
}

function showState(text, kind) {
  at("state").textContent = text;
  at("state").className = kind;
}

// Listens for as long as the page is open; a server that has gone is asked again every few seconds.
async function watch() {
  for (;;) {
    let first = true;
    try {
      await listen("inspector/events", {}, (event) => {
        if (first) begin(event); else take(event);
        if (first) {
          showState("connected", "on");
          at("key-field").hidden = true;
        }
        first = false;
      });
      showState("the server has closed", "off");
    } catch (error) {
      showState(error instanceof Refused ? error.message : "not connected", "off");
    }
    await new Promise((resolve) => { wake = resolve; setTimeout(resolve, 3000); });
  }
}

let wake = () => {};
at("key-field").addEventListener("submit", (event) => { event.preventDefault(); sessionStorage.setItem("key", at("key").value); wake(); });
watch();
