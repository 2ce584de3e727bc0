"""The page of `--serve`: plain HTML and a script that draws what /api/state says. Nothing comes from outside."""

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Training monitor</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><link rel="stylesheet" href="/style.css"></head>
<body><main>
<header><h1>Training monitor</h1><span id="health" class="badge"></span><span id="note" class="soft"></span></header>
<section id="compare" class="run" hidden><h2>Compare</h2>
<p><label>Value <select id="value"></select></label> <span id="legend"></span></p><div id="overlay"></div></section>
<div id="runs" class="runs"></div>
<noscript>This page needs JavaScript; 'runwatch --once LOG' prints the same as text.</noscript>
</main><script src="/app.js"></script></body></html>
"""

SCRIPT = r"""
"use strict";
const LABELS = {loss: "loss", text_loss: "text", latent_loss: "latent", text_accuracy: "accuracy",
  valid_loss: "validation", lr: "learning rate", grad_norm: "gradient norm", rate: "rate", mfu: "MFU",
  gpu_busy: "GPU busy", gpu_memory_allocated: "memory", data_wait: "data wait", disk_free: "disk free"};
const UNITS = {tokens_per_second: "tokens/s", documents_per_second: "documents/s", steps_per_second: "steps/s",
  epochs_per_second: "epochs/s"};
const SHARES = ["text_accuracy", "mfu", "gpu_busy", "data_wait"];
const BYTES = ["gpu_memory_allocated", "disk_free"];
const CAUSES = {useful: "#2a9d6f", data: "#d0683a", start: "#8a94a0", compile: "#a45cc4", evaluation: "#2468b8",
  checkpoint: "#1f9c9c", recovery: "#b3261e", other: "#b9a13a"};
const LEVELS = ["info", "warn", "error"];
const SVG = "http://www.w3.org/2000/svg";

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
function precise(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : size < 0.001 ? value.toExponential(2)
    : String(Number(value.toPrecision(4)));
}
function shown(name, value, kind) {
  if (typeof value !== "number") return String(value);
  if (SHARES.includes(name)) return (100 * value).toFixed(1) + " %";
  if (BYTES.includes(name)) return (value / 2 ** 30).toFixed(1) + " GiB";
  return precise(value) + (name === "rate" && UNITS[kind] ? " " + UNITS[kind] : "");
}
function duration(seconds) {
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? (seconds / 3600).toFixed(1) + " h" : (seconds / 86400).toFixed(1) + " days";
}
function progress(run) {
  if (run.step === null) return "no step yet";
  let text = (run.counts === "epochs" ? "epoch " : "step ") + run.step.toLocaleString("en");
  const total = run.total_steps;
  if (total) text += ` of ${total.toLocaleString("en")} (${Math.round(100 * run.step / total)} %)`;
  return run.left_seconds === null ? text : text + `, about ${duration(run.left_seconds)} left`;
}

function picture(svg) {
  const parsed = new DOMParser().parseFromString(svg.replace("<svg ", `<svg xmlns="${SVG}" `), "image/svg+xml");
  return document.importNode(parsed.documentElement, true);
}

function alertBox(alert) {
  const times = alert.count > 1 ? `, ${alert.count} times` : "";
  const steps = alert.first_step === null ? "" : alert.first_step === alert.last_step ? ` step ${alert.first_step}`
    : ` steps ${alert.first_step} to ${alert.last_step}`;
  const over = alert.status === "resolved" ? " resolved," : "";
  const head = make("p", "", make("b", "", `${alert.level} ${alert.code} ${alert.name}`),
    make("span", "soft", `${over}${steps}${times}, ${Math.round(100 * alert.sure)} % sure`));
  const advice = alert.status === "open" ? make("p", "soft", alert.advice) : null;
  return make("div", `alert ${alert.level} ${alert.status}`, head, make("p", "", alert.evidence), advice);
}
function valueList(run) {
  const list = make("dl", "");
  for (const [name, value] of Object.entries(run.values)) {
    const behind = run.behind[name] ? ` (${run.behind[name].toLocaleString("en")} steps ago)` : "";
    const text = shown(name, value, run.rate_kind) + behind;
    if (LABELS[name]) list.append(make("div", "", make("dt", "", LABELS[name]), make("dd", "", text)));
  }
  return list;
}
function bucketBars(run) {
  return Object.entries(run.buckets).map(([name, values]) => {
    const largest = Math.max(...values.filter(value => typeof value === "number"), 1e-12);
    const bars = make("div", "buckets");
    for (const value of values) {
      const bar = make("i", "");
      bar.style.height = (typeof value === "number" ? 100 * value / largest : 0) + "%";
      bar.title = String(value);
      bars.append(bar);
    }
    return make("figure", "", make("figcaption", "", name.replaceAll("_", " ") + ", from clean to noise"), bars);
  });
}
function goodput(run) {
  if (!run.goodput) return null;
  const stripe = make("div", "shares"), words = [];
  for (const [cause, share] of Object.entries(run.goodput.shares)) {
    if (!share) continue;
    const part = make("i", "");
    part.style.width = 100 * share + "%";
    part.style.background = CAUSES[cause];
    stripe.append(part);
    words.push(`${cause} ${(100 * share).toFixed(1)} %`);
  }
  const title = `Goodput ${(100 * run.goodput.goodput).toFixed(1)} % of ${duration(run.goodput.wall_seconds)}`;
  return make("div", "", make("h3", "", title), stripe, make("p", "soft", words.join(", ")));
}
function samples(run) {
  if (!run.samples) return null;
  const box = make("details", "", make("summary", "", `Decoded at step ${run.samples.step}`));
  for (const item of run.samples.samples) {
    if (typeof item !== "object" || item === null) continue;
    const rows = Object.entries(item).map(([key, value]) =>
      make("div", "", make("span", "soft", key + " "), String(value)));
    box.append(make("div", "sample", ...rows));
  }
  return box;
}
const opened = new Set();
function keepOpen(element, key) {
  if (!element) return null;
  element.open = opened.has(key);
  element.addEventListener("toggle", () => element.open ? opened.add(key) : opened.delete(key));
  return element;
}
function timeline(run) {
  const rows = run.timeline.slice(-60).reverse().map(entry => make("tr", "",
    make("td", "", entry.time ? new Date(1000 * entry.time).toLocaleTimeString() : ""),
    make("td", "", entry.step === null ? "" : String(entry.step)), make("td", "", entry.what)));
  if (!rows.length) return null;
  return make("details", "", make("summary", "", "Timeline"), make("div", "scroll", make("table", "", ...rows)));
}
function css(health) { return health.replace(" ", "-"); }
function unread(run) {
  const lines = run.unread ? run.unread.lines : [], names = run.unread ? run.unread.names : [];
  const reason = make("p", "", "No loss was read. " + (names.length
    ? "Name it: --map loss=NAME --map step=NAME; names read: " + names.join(", ")
    : "No line looks like numbers with names."));
  return make("div", "alert warn", reason, ...lines.map(line => make("p", "soft", line)));
}
function runCard(run) {
  const silent = run.last_line_seconds === null ? "" : `, last line ${duration(run.last_line_seconds)} ago`;
  const bar = make("div", "bar", make("i", ""));
  bar.firstChild.style.width = (run.total_steps ? Math.min(100, 100 * (run.step || 0) / run.total_steps) : 0) + "%";
  const order = [...run.alerts].sort((a, b) => (a.status === "resolved") - (b.status === "resolved")
    || LEVELS.indexOf(b.level) - LEVELS.indexOf(a.level));
  const nothing = run.health === "cannot judge" ? unread(run)
    : make("p", "badge fine", run.num_losses ? "nothing found" : "nothing read yet");
  const plots = make("div", "plots");
  for (const [name, svg] of Object.entries(run.charts))
    plots.append(make("figure", "", make("figcaption", "", LABELS[name] || name), picture(svg)));
  plots.append(...bucketBars(run));
  return make("section", "run " + css(run.health), make("h2", "", run.name),
    make("p", "", make("span", "badge " + css(run.health), run.health), ` ${run.state}, ${progress(run)}`,
      make("span", "soft", silent)), run.total_steps ? bar : null,
    ...(order.length ? order.map(alertBox) : [nothing]),
    valueList(run), goodput(run), make("h3", "", "Curves"), plots,
    keepOpen(samples(run), run.name + " samples"), keepOpen(timeline(run), run.name + " timeline"));
}

const select = document.getElementById("value");
function compare(state) {
  const box = document.getElementById("compare");
  box.hidden = state.runs.length < 2;
  const names = Object.keys(LABELS).filter(name => state.overlays[name]);
  const chosen = select.value || "loss";
  select.replaceChildren(...names.map(name => new Option(LABELS[name], name, false, name === chosen)));
  const runs = state.runs.filter(run => run.curves[select.value]);
  const legend = runs.map((run, number) => make("span", "c" + number % 4, " ● ", make("span", "soft", run.name)));
  document.getElementById("legend").replaceChildren(...legend);
  const overlay = document.getElementById("overlay"), sizes = state.overlays[select.value];
  const svg = sizes && sizes[overlay.clientWidth < 700 ? "narrow" : "wide"];
  overlay.replaceChildren(...(svg ? [picture(svg)] : []));
}

let latest = null;
function show(state) {
  latest = state;
  const health = document.getElementById("health");
  health.textContent = state.health;
  health.className = "badge " + css(state.health);
  document.title = `${state.health} · Training monitor`;
  document.getElementById("runs").replaceChildren(...state.runs.map(runCard));
  compare(state);
}
select.addEventListener("change", () => latest && compare(latest));
async function look() {
  const note = document.getElementById("note");
  let wait = 5;
  try {
    const answer = await fetch("/api/state", {cache: "no-store"});
    const state = await answer.json();
    wait = state.interval || wait;
    show(state);
    note.textContent = "as of " + new Date(1000 * state.time).toLocaleTimeString();
  } catch (error) {
    note.textContent = "the monitor does not answer; is it still running?";
  }
  setTimeout(look, 1000 * wait);
}
look();
"""
