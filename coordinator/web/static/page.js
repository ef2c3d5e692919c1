// The page: one document from the coordinator, as of now or of an earlier event, drawn by one renderer.

import { chart } from "./chart.js";
import { isOperator, nodeButtons, runButtons } from "./direct.js";
import { bar, clock, duration, el, empty, kind, layers, number, rough, table, words } from "./dom.js";
import { historyView } from "./lanes.js";
import { moves, planGraph, planView } from "./plan.js";

const at = (id) => document.getElementById(id);
const chosen = { axis: "steps", links: "megabits", plans: false };
let shown = null; // the document that is drawn
let event = null; // the event as of which it is drawn; null: the newest
let loading = false, again = false, playing = false, directs = false, drawn = new Map();

async function fetched(sequence) {
  const response = await fetch(sequence === null ? "state" : `state?at=${sequence}`);
  if (response.status === 403) location.reload(); // it says why
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

async function load() {
  again = true;
  if (loading) return;
  loading = true;
  try {
    while (again) {
      again = false;
      const found = await fetched(event);
      if (event === null || found.at <= event) shown = found;
      render();
    }
  } catch (problem) {
    say(`The coordinator does not answer (${problem.message}). This is as of ${shown ? clock(shown.time) : "no time"}.`);
    playing = false;
  } finally {
    loading = false;
  }
}

// Draws what changed, and keeps what is open and where the keyboard is.
function place(id, key, make) {
  const box = at(id), text = JSON.stringify(key);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  const focus = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const open = [...box.querySelectorAll("details[open]")].map((one) => one.dataset.keep);
  const scrolled = [...box.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  box.replaceChildren(...[make()].flat(2).filter(Boolean));
  for (const one of box.querySelectorAll("details")) one.open = open.includes(one.dataset.keep);
  box.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] || 0; });
  if (focus) [...box.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focus)?.focus();
}

function render() {
  const doc = shown, { head } = doc, width = Math.max(300, at("plan-view").clientWidth);
  document.title = head.name ? `${head.step} of ${head.steps}: ${head.name}` : "dtfm";
  at("name").textContent = head.name || "No run yet";
  const behind = doc.last - doc.at > 1000; // as after a restart with a long log
  if (event !== null) say(`replay: event ${number(doc.at)} of ${number(doc.last)}`, "replay");
  else say(behind ? `reading the log: ${Math.floor((100 * doc.at) / doc.last)}%` : head.state + (head.said && `: ${head.said}`), behind ? "waiting" : head.state);
  place("figures", head, () => figures(head));
  place("direct", [directs, head.state], () => (directs ? runButtons(head.state, openDetail) : []));
  place("curves", [doc.losses, doc.held_out, width, chosen.axis], () => curves(doc, width));
  place("plan-view", [doc.plan, doc.nodes, head.members, width], () => planView(doc, width, openNode));
  const lanes = { is: chosen.plans, toggle: () => { chosen.plans = !chosen.plans; render(); } };
  place("history-view", [doc.spans, doc.plans, doc.time, width, chosen.plans], () => historyView(doc, width, openPlan, lanes));
  place("nodes-view", [doc.nodes, doc.left_out], () => nodeTable(doc));
  place("given-view", doc.contributions, () => given(doc.contributions));
  place("links-view", [doc.links, chosen.links], () => linkMap(doc.links));
  place("events-view", doc.events, () => el("ol", { class: "events" }, [...doc.events].reverse().map(([, time, said]) => el("li", {}, el("time", {}, clock(time)), el("span", {}, said)))));
  const slider = at("at");
  slider.max = doc.last;
  if (document.activeElement !== slider || event === null) slider.value = event ?? doc.last;
  slider.setAttribute("aria-valuetext", `event ${doc.at}, step ${head.step}`);
  at("when").textContent = `step ${number(head.step)} · ${clock(doc.time)}`;
  at("live").setAttribute("aria-pressed", String(event === null));
  at("play").textContent = playing ? "Pause" : "Play";
}

function say(text, shade = "failed") {
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").className = shade;
}

function figures(head) {
  const figure = (name, value, small = "") => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value, el("small", {}, small)));
  const left = head.left === null ? ["Elapsed", duration(head.elapsed)] : ["Time left", duration(head.left), ` after ${duration(head.elapsed)}`];
  const part = head.steps ? head.step / head.steps : 0;
  return [
    el("dl", {},
      figure("Step", number(head.step), ` of ${number(head.steps)}`),
      figure("Loss", rough(head.loss)),
      figure("Held-out loss", rough(head.held_out), head.frequencies === null ? "" : ` frequencies alone ${rough(head.frequencies)}`),
      figure("Tokens/s", number(head.tokens_per_second)),
      figure(...left),
      figure("Lent", rough(head.node_hours), ` node-hours, ${number(head.members)} node${head.members === 1 ? "" : "s"} now`),
      head.cost > 0 && figure("Cost", number(head.cost, 2), ` ${number(head.hourly_price, 2)} an hour now`)),
    bar(part, "", `${Math.round(100 * part)}% of the steps`, "progress"),
  ];
}

function curves(doc, width) {
  const byTime = chosen.axis === "time", x = byTime ? 1 : 0;
  const xText = byTime ? (time) => duration(time - doc.began) : (step) => `step ${number(step)}`;
  const wide = width > 900 ? Math.floor((width - 24) * 0.62) : width, narrow = width > 900 ? width - 24 - wide : width;
  const series = (name, shade, points, y) => ({ name, kind: shade, points: points.filter((point) => point[y] !== null).map((point) => [point[x], point[y]]) });
  return [
    choice("Over", { steps: "over steps", time: "over time" }, "axis"),
    el("div", { class: "charts" },
      chart("Loss", [series("loss", "loss", doc.losses, 2), series("held out", "held", doc.held_out, 2)], wide, 240, xText),
      chart("Speed", [series("tokens/s", "speed", doc.losses, 3)], narrow, 240, xText, true)),
  ];
}

// Buttons of which one is pressed: what is ``chosen`` as ``what``.
function choice(label, options, what) {
  return el("div", { class: "choice", role: "group", "aria-label": label }, Object.entries(options).map(([value, text]) =>
    el("button", { type: "button", "data-key": value, "aria-pressed": String(value === chosen[what]), onclick: () => { chosen[what] = value; render(); } }, text)));
}

const gibibytes = (device) => `${rough(device.memory_bytes / 2 ** 30)} GiB`;
const spent = (node) => `computed ${rough(node.busy)} s, waited ${rough(node.waited)} s`;
const gave = (one) => `${number(one.micro_batches)} micro-batches in ${number(one.steps)} steps, ${duration(one.computed)} of computing`;

function nodeTable(doc) {
  if (!doc.nodes.length) return empty("No node has joined yet. dtfm-coordinator invite prints the line for one.");
  const heads = ["Node", ["Does", "does"], ["Device", "wide"], ["Memory", "n wide"], ["GFLOP/s", "n wide"], ["Micro-batches", "n wide"], "Last step", ["Standing", "wide"]];
  const rows = doc.nodes.map((node) => [
    el("button", { type: "button", class: "name", "data-key": `node-${node.node}`, onclick: () => openNode(node.node) }, node.node),
    [el("i", { class: kind(node) }), words(node)],
    node.device?.name, node.device && gibibytes(node.device), node.device && rough(node.device.flops / 1e9), node.load || "",
    node.busy == null ? "" : bar(node.busy / (node.busy + node.waited || 1), kind(node), spent(node)),
    node.standing.word,
  ]);
  return [table(heads, rows, "Nodes"), doc.left_out > 0 && el("p", { class: "muted" }, `and ${number(doc.left_out)} more`)];
}

function given(contributions) {
  if (!contributions.length) return empty("Nothing yet: this fills with each step.");
  const most = contributions[0].share || 1;
  return el("ol", { class: "given" }, contributions.map((one) => el("li", { class: one.present ? "" : "left" },
    el("span", { class: "name" }, one.node, !one.present && el("small", {}, " has left")),
    bar(one.share / most, "", `${rough(100 * one.share)}% of all micro-batches`),
    el("b", {}, `${rough(100 * one.share)}%`), el("span", { class: "muted" }, gave(one)))));
}

function linkMap(links) {
  const known = links[chosen.links].flat().filter((value) => value > 0).map(Math.log), fast = chosen.links === "megabits";
  if (!known.length) return empty("No link has been measured yet.");
  const low = Math.min(...known), span = Math.max(...known) - low || 1, small = links.nodes.length > 14;
  const heat = (value) => (fast ? Math.log(value) - low : low + span - Math.log(value || Math.exp(low))) / span;
  const cell = (source, row, destination, column) => {
    const value = links[chosen.links][row][column], broken = links.megabits[row][column] === 0;
    if (row === column || value === null) return el("td");
    const said = broken ? "nothing passes" : `${rough(value)} ${fast ? "Mbit/s" : "ms"}`;
    return el("td", { class: broken ? "broken" : `q${Math.round(4 * heat(value))}`, title: `${source} to ${destination}: ${said}` }, small ? "" : broken ? "✕" : rough(value));
  };
  return [
    choice("Map of", { megabits: "bandwidth", milliseconds: "latency" }, "links"),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Links, from the row's node to the column's" }, el("table", { class: small ? "map small" : "map" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "from ↓ to →"), links.nodes.map((node) => el("th", { scope: "col", title: node }, node)))),
      el("tbody", {}, links.nodes.map((source, row) => el("tr", {}, el("th", { scope: "row", title: source }, source), links.nodes.map((destination, column) => cell(source, row, destination, column))))))),
    el("p", { class: "muted" }, fast ? "Mbit/s; the stronger the colour, the faster." : "Milliseconds one way; the stronger the colour, the nearer.",
      links.left_out > 0 && ` ${number(links.left_out)} more nodes are not shown.`),
  ];
}

function openDetail(title, ...children) {
  at("detail").replaceChildren(
    el("header", {}, el("h2", { id: "detail-title" }, title), el("button", { type: "button", onclick: () => at("detail").close() }, "Close")),
    ...children.filter(Boolean));
  if (!at("detail").open) at("detail").showModal();
}

function openNode(name) {
  const node = shown.nodes.find((one) => one.node === name), one = shown.contributions.find((each) => each.node === name);
  const facts = {
    Does: node.layers ? `${words(node)}, ${layers(node.layers)}, ${number(node.load)} micro-batches a step` : words(node),
    Leaving: node.leaving,
    Device: node.device && `${node.device.name} (${node.device.kind}), ${gibibytes(node.device)}, ${rough(node.device.flops / 1e9)} GFLOP/s`,
    "Last step": node.busy != null && spent(node),
    Reached: node.reached,
    Sends: node.sends,
    Standing: `${node.standing.word}: ${node.standing.reason}`,
    Gave: one && gave(one),
  };
  openDetail(name, el("dl", { class: "facts" }, Object.entries(facts).filter(([, text]) => text).map(([what, text]) => [el("dt", {}, what), el("dd", {}, text)])),
    directs && nodeButtons(name, node.doing === "quarantined"));
}

async function openPlan(generation) {
  const [before, after] = await Promise.all([fetched(generation.sequence - 1), fetched(generation.sequence)]);
  const wide = Math.min(window.innerWidth - 48, 1080), each = wide > 700 ? wide / 2 - 32 : wide - 16;
  const moved = moves(before.plan, after.plan);
  const side = (title, doc) => el("section", {}, el("h3", {}, title), doc.plan ? planGraph(doc.plan, doc.nodes, each, null) : empty("There was no plan."));
  openDetail(`Plan ${generation.generation}, after step ${number(generation.step)}`, el("p", { class: "why" }, generation.reason),
    el("div", { class: "sides" }, side("Before", before), side("After", after)),
    moved.length > 0 && table(["Node", "Before", "After"], moved, "Who moved"));
}

function goTo(sequence) {
  event = sequence === null || sequence >= shown.last ? null : Math.max(1, sequence);
  if (event === null) playing = false;
  return load();
}

async function play() {
  playing = !playing;
  if (playing && event === null) event = 1;
  while (playing) {
    const next = (event ?? 1) + Math.max(1, Math.round(shown.last / 150));
    await goTo(next);
    await new Promise((done) => setTimeout(done, 120));
  }
  if (shown) render();
}

at("at").addEventListener("input", () => { playing = false; goTo(Number(at("at").value)); });
at("play").addEventListener("click", play);
at("live").addEventListener("click", () => goTo(null));
at("detail").addEventListener("click", (clicked) => { if (clicked.target === at("detail")) at("detail").close(); });
new ResizeObserver(() => { if (shown) render(); }).observe(at("main"));

const news = new EventSource("news");
news.onmessage = ({ data }) => {
  if (event === null) load();
  else at("at").max = data;
};
news.onerror = () => {
  say("The coordinator does not answer; this page tries again.");
  if (news.readyState === EventSource.CLOSED) fetched(event).catch(() => {});
};
load();
isOperator().then((is) => { directs = is; if (shown) render(); }, () => {});
