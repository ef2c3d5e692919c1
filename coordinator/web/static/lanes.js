// History as a picture: a lane for each node over time, and a line across for each plan.

import { clock, cut, duration, el, empty, few, kind, narrow, svg, when, words } from "./dom.js";

const LANE = 20, GAP = 5, TOP = 26, BOTTOM = 22, RIGHT = 12;
const LANES = 40, LANES_ON_A_PHONE = 8, PLANS = 6, PLANS_ON_A_PHONE = 2;

export function historyView(doc, width, openPlan, all) {
  if (!doc.spans.length) return empty("No node has joined yet.");
  const [shown, more] = few([...new Set(doc.spans.map((span) => span.node))], narrow() ? LANES_ON_A_PHONE : LANES, "all-lanes", all.is, all.toggle);
  const left = width < 500 ? 84 : 150, letters = Math.floor((left - 10) / 6.8);
  const lanes = shown;
  const row = new Map(lanes.map((node, index) => [node, TOP + index * (LANE + GAP)]));
  const spans = doc.spans.filter((span) => row.has(span.node));
  const from = Math.min(...doc.spans.map((span) => span.began)), to = Math.max(doc.head.over ?? doc.time, from + 1);
  const across = (time) => left + ((time - from) / (to - from)) * (width - left - RIGHT);
  const height = TOP + lanes.length * (LANE + GAP) + BOTTOM;
  const picture = svg("svg", { class: "lanes", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `What ${lanes.length} nodes did, from ${clock(from)} to ${clock(to)}` });
  for (const node of lanes) picture.append(
    svg("rect", { class: "lane", x: left, y: row.get(node), width: width - left - RIGHT, height: LANE, rx: 3 }),
    svg("text", { class: "name", x: left - 8, y: row.get(node) + 14, "text-anchor": "end" }, cut(node, letters), svg("title", {}, cut(node, 100))));
  for (const span of spans) {
    const { node, began, why } = span, ended = span.ended || to, text = words(span);
    const x = across(began), wide = Math.max(1, across(ended) - x), y = row.get(node);
    picture.append(svg("g", {},
      svg("rect", { class: `span ${kind(span)}`, x, y, width: wide.toFixed(1), height: LANE, rx: Math.min(3, wide / 2) }),
      wide > text.length * 6.5 + 8 && svg("text", { class: "inside", x: x + 6, y: y + 14 }, text),
      svg("title", {}, `${cut(node, 100)}: ${text}, ${duration(ended - began)}${why ? `; left: ${why}` : ""}`)));
    if (why) picture.append(svg("path", { class: "end", d: `M${x + wide - 4} ${y + 6}l8 8m0 -8l-8 8` }, svg("title", {}, `${cut(node, 100)} left: ${why}`)));
  }
  let last = -99;
  for (const plan of doc.plans) {
    const x = across(plan.time), named = x - last > 22;
    picture.append(svg("g", { class: "generation", onclick: () => openPlan(plan) },
      svg("line", { x1: x, x2: x, y1: named ? 18 : TOP - 4, y2: height - BOTTOM }), svg("line", { class: "hit", x1: x, x2: x, y1: 0, y2: height - BOTTOM }),
      named && svg("rect", { x: x - 10, y: 2, width: 20, height: 16, rx: 8 }), named && svg("text", { x, y: 14, "text-anchor": "middle" }, plan.generation),
      svg("title", {}, `Plan ${plan.generation}, after step ${plan.step}: ${plan.reason}`)));
    if (named) last = x;
  }
  const marks = Math.max(2, Math.floor((width - left) / 120));
  for (let mark = 0; mark <= marks; mark += 1) {
    const anchor = mark === 0 ? "start" : mark === marks ? "end" : "middle", time = from + ((to - from) * mark) / marks;
    picture.append(svg("text", { class: "tick", x: across(time), y: height - 6, "text-anchor": anchor }, clock(time)));
  }
  const kinds = [...new Map(spans.map((span) => [kind(span), words(span)]))];
  return [
    el("div", { class: "legend" },
      kinds.sort(([a], [b]) => a.localeCompare(b)).map(([shade, text]) => el("span", {}, el("i", { class: shade }), text)),
      spans.some((span) => span.why) && el("span", {}, el("b", {}, "× "), "left or lost"),
      doc.plans.length > 0 && el("span", {}, el("b", { class: "number" }, "1"), " a plan begins")),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lanes" }, picture), more,
  ];
}

// Each plan with its reason, which stands nowhere else.
export function planList(doc, openPlan, all) {
  const newest = [...doc.plans].reverse(), current = doc.plan && doc.plan.in_force ? doc.plan.generation : null;
  const [shown, more] = few(newest, narrow() ? PLANS_ON_A_PHONE : PLANS, "all-plans", all.is, all.toggle);
  return [
    el("h3", {}, "Plans and why, the newest first"),
    el("ol", { class: "plans" }, shown.map((plan) => el("li", {}, el("button", { type: "button", "data-key": `plan-${plan.sequence}`, onclick: () => openPlan(plan) },
      el("b", {}, `Plan ${plan.generation}`), el("span", { class: "muted" }, `${plan.generation === current ? ", in force" : ""} since ${when(plan.time, doc.time)}, after step ${plan.step}`), el("span", { class: "reason" }, plan.reason))))),
    more,
  ];
}
