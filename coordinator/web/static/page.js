// The page: one document from the coordinator, as of now or of an earlier event, drawn by one renderer.

import { curves } from "./curves.js";
import { isOperator, runButtons } from "./direct.js";
import { clock, el, empty, narrow, number, table } from "./dom.js";
import { eventList } from "./events.js";
import { figures, verdict, verdictText } from "./figures.js";
import { historyView, planList } from "./lanes.js";
import { linkMap } from "./links.js";
import { given, nodeDetail, nodeTable } from "./nodes.js";
import { moves, planGraph, planView } from "./plan.js";
import { textList } from "./texts.js";

const at = (id) => document.getElementById(id);
const chosen = { axis: "steps", smooth: "smooth", links: "megabits", events: "all", open: new Set() };
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

function pick(change) {
  Object.assign(chosen, change);
  render();
}

// Whether a list is shown whole, and what changes that.
function all(name) {
  return { is: chosen.open.has(name), toggle: () => { if (!chosen.open.delete(name)) chosen.open.add(name); render(); } };
}

function render() {
  const doc = shown, { head } = doc, width = Math.max(300, at("plan-view").clientWidth), open = [...chosen.open], small = narrow();
  document.title = head.name ? `${head.step} of ${head.steps}: ${verdictText(head, doc.time)} · ${head.name}` : "dtfm";
  at("name").textContent = head.name || "No run yet";
  const behind = doc.last - doc.at > 1000; // as after a restart with a long log
  if (event !== null) say(`replay: event ${number(doc.at)} of ${number(doc.last)}`, "replay");
  else say(behind ? `reading the log: ${Math.floor((100 * doc.at) / doc.last)}%` : head.over ? "the run's report" : head.state, behind ? "waiting" : head.state);
  place("verdict", [head.conditions, doc.time > 0 && new Date(doc.time * 1000).getDate()], () => verdict(head, doc.time));
  place("figures", head, () => figures(head));
  place("direct", [directs, head.state], () => (directs ? runButtons(head.state, openDetail) : []));
  place("curves", [doc.losses, doc.held_out, width, chosen.axis, chosen.smooth, small], () => curves(doc, width, chosen, pick));
  place("texts", doc.texts, () => [textList(doc.texts)]);
  place("plan-view", [doc.plan, doc.plans, doc.nodes, head.members, width, open], () => planView(doc, width, openNode, planList(doc, openPlan, all("plans"))));
  place("history-view", [doc.spans, doc.plans, doc.time, width, open], () => historyView(doc, width, openPlan, all("lanes")));
  place("nodes-view", [doc.nodes, doc.left_out, open, small], () => nodeTable(doc, openNode, all("nodes")));
  place("given-view", [doc.contributions, head.over, open, small], () => given(doc, all("given")));
  place("links-view", [doc.links, chosen.links], () => linkMap(doc.links, chosen.links, (links) => pick({ links })));
  place("events-view", [doc.events, chosen.events, open, small], () => eventList(doc, chosen.events, (events) => pick({ events }), all("events")));
  // Once a run is over and its nodes have gone home, the page is its report.
  for (const [id, there] of [["nodes", doc.nodes.length], ["links", head.members]]) {
    at(id).hidden = head.over !== null && !there;
    document.querySelector(`nav a[href="#${id}"]`).hidden = at(id).hidden;
  }
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

function openDetail(title, ...children) {
  at("detail").replaceChildren(
    el("header", {}, el("h2", { id: "detail-title" }, title), el("button", { type: "button", onclick: () => at("detail").close() }, "Close")),
    ...children.filter(Boolean));
  if (!at("detail").open) at("detail").showModal();
}

const openNode = (name) => openDetail(name, ...nodeDetail(shown, name, directs));

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
if (narrow()) at("links-fold").open = false;
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
